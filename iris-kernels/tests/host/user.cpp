// Kernels of user_kernels.cu as host code, launched by name.
#include <cstring>

#include "launch.h"

#include "../user_kernels.cu"

/// Runs the kernel called `name` with `groups` workgroups, and returns when it has ended; false if
/// there is no such kernel.
extern "C" bool user_launch(const char* name, void** args, u32 groups) {
#define KERNEL(entry)                                                                              \
    if (std::strcmp(name, #entry) == 0) return launch(entry, args, groups), true;
    KERNEL(operate_i32)
    KERNEL(operate_i64)
    KERNEL(contend_i32)
    KERNEL(contend_i64)
    KERNEL(copies_2)
    KERNEL(copies_4)
    KERNEL(copies_8)
    KERNEL(copies_16)
    KERNEL(rectangle)
    KERNEL(wait_in_vain)
#undef KERNEL
    return false;
}
