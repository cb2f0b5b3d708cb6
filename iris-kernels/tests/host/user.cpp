// The users' kernels of the tests as host code: each workgroup of a launch, and each lane of a
// workgroup, is a thread.
#include <cstring>
#include <utility>

#include "hooks.cpp"

#include "../user_kernels.cu"

namespace {

template <class... Args, std::size_t... I>
void launch(void (*entry)(Args...), void** args, u32 groups, std::index_sequence<I...>) {
    const auto run = [&](Group* own, u32 lane) {
        group = own;
        lane_index = lane;
        rounds = 0;
        entry(*static_cast<Args*>(args[I])...);
    };
    std::vector<std::unique_ptr<Group>> all;
    std::vector<std::thread> threads;
    for (u32 index = 0; index < groups; ++index) {
        all.push_back(std::make_unique<Group>(index, groups));
        for (u32 lane = 0; lane < LANES; ++lane) threads.emplace_back(run, all.back().get(), lane);
    }
    for (std::thread& thread : threads) thread.join();
}

template <class... Args> void launch(void (*entry)(Args...), void** args, u32 groups) {
    launch(entry, args, groups, std::index_sequence_for<Args...>{});
}

} // namespace

/// Run the kernel of this name, and return when it has ended; false if there is none.
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
    KERNEL(wait_in_vain)
#undef KERNEL
    return false;
}
