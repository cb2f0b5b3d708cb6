// multiply_add(): one wgmma of a warpgroup, 64 rows x `width` columns, 16 deep along K, with both factors in
// shared memory. Included by gemm/core.h and gemm/sm90.h.
//
// A_ACROSS, B_ACROSS: K is the strided dimension of the factor, so K goes from line to line. If `keep` is 0,
// the sums are set to the product, otherwise the product is added.
#ifndef IRIS_GEMM_SM90_WGMMA_H
#define IRIS_GEMM_SM90_WGMMA_H

#include "iris/dtype.h"

// Lists of the sums' registers: names in the instruction (IRIS_REGISTERS_n) and operands of the asm statement
// (IRIS_SUMS_n). Each list begins with the previous one.
#define IRIS_REGISTERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define IRIS_REGISTERS_16 IRIS_REGISTERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define IRIS_REGISTERS_32                                                                          \
    IRIS_REGISTERS_16                                                                              \
    ", %16, %17, %18, %19, %20, %21, %22, %23, "                                                   \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define IRIS_REGISTERS_48                                                                          \
    IRIS_REGISTERS_32                                                                              \
    ", %32, %33, %34, %35, %36, %37, %38, %39, "                                                   \
    "%40, %41, %42, %43, %44, %45, %46, %47"
#define IRIS_REGISTERS_64                                                                          \
    IRIS_REGISTERS_48                                                                              \
    ", %48, %49, %50, %51, %52, %53, %54, %55, "                                                   \
    "%56, %57, %58, %59, %60, %61, %62, %63"
#define IRIS_REGISTERS_80                                                                          \
    IRIS_REGISTERS_64                                                                              \
    ", %64, %65, %66, %67, %68, %69, %70, %71, "                                                   \
    "%72, %73, %74, %75, %76, %77, %78, %79"
#define IRIS_REGISTERS_96                                                                          \
    IRIS_REGISTERS_80                                                                              \
    ", %80, %81, %82, %83, %84, %85, %86, %87, "                                                   \
    "%88, %89, %90, %91, %92, %93, %94, %95"
#define IRIS_REGISTERS_112                                                                         \
    IRIS_REGISTERS_96                                                                              \
    ", %96, %97, %98, %99, %100, %101, %102, %103, "                                               \
    "%104, %105, %106, %107, %108, %109, %110, %111"
#define IRIS_REGISTERS_128                                                                         \
    IRIS_REGISTERS_112                                                                             \
    ", %112, %113, %114, %115, %116, %117, %118, %119, "                                           \
    "%120, %121, %122, %123, %124, %125, %126, %127"

#define IRIS_EIGHT(i)                                                                              \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define IRIS_SUMS_8 IRIS_EIGHT(0)
#define IRIS_SUMS_16 IRIS_SUMS_8, IRIS_EIGHT(8)
#define IRIS_SUMS_32 IRIS_SUMS_16, IRIS_EIGHT(16), IRIS_EIGHT(24)
#define IRIS_SUMS_48 IRIS_SUMS_32, IRIS_EIGHT(32), IRIS_EIGHT(40)
#define IRIS_SUMS_64 IRIS_SUMS_48, IRIS_EIGHT(48), IRIS_EIGHT(56)
#define IRIS_SUMS_80 IRIS_SUMS_64, IRIS_EIGHT(64), IRIS_EIGHT(72)
#define IRIS_SUMS_96 IRIS_SUMS_80, IRIS_EIGHT(80), IRIS_EIGHT(88)
#define IRIS_SUMS_112 IRIS_SUMS_96, IRIS_EIGHT(96), IRIS_EIGHT(104)
#define IRIS_SUMS_128 IRIS_SUMS_112, IRIS_EIGHT(112), IRIS_EIGHT(120)

namespace iris::gemm {

// multiply_add() for `sums` sums per thread. The operands after the sums have the next numbers: the
// descriptors of both factors, `keep`, and A_ACROSS and B_ACROSS.
#define IRIS_MULTIPLY_ADD(width, sums, a_at, b_at, keep_at, a_across_at, b_across_at)              \
    template <bool A_ACROSS, bool B_ACROSS>                                                        \
    IRIS_DEVICE void multiply_add(float (&d)[sums], u64 a, u64 b, u32 keep) {                      \
        asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, " keep_at ", 0;\n"                        \
                     " wgmma.mma_async.sync.aligned.m64n" #width "k16.f32." IRIS_FACTOR_MMA            \
                     "." IRIS_FACTOR_MMA "\n"                                                          \
                     "{" IRIS_REGISTERS_##sums "}, \n"                                             \
                     a_at ", " b_at ", p, 1, 1, " a_across_at ", " b_across_at ";\n}"              \
                     : IRIS_SUMS_##sums                                                            \
                     : "l"(a), "l"(b), "r"(keep), "n"(A_ACROSS ? 1 : 0), "n"(B_ACROSS ? 1 : 0)     \
                     : "memory");                                                                  \
    }

IRIS_MULTIPLY_ADD(16, 8, "%8", "%9", "%10", "%11", "%12")
IRIS_MULTIPLY_ADD(32, 16, "%16", "%17", "%18", "%19", "%20")
IRIS_MULTIPLY_ADD(64, 32, "%32", "%33", "%34", "%35", "%36")
IRIS_MULTIPLY_ADD(128, 64, "%64", "%65", "%66", "%67", "%68")
IRIS_MULTIPLY_ADD(160, 80, "%80", "%81", "%82", "%83", "%84")
IRIS_MULTIPLY_ADD(192, 96, "%96", "%97", "%98", "%99", "%100")
IRIS_MULTIPLY_ADD(224, 112, "%112", "%113", "%114", "%115", "%116")
IRIS_MULTIPLY_ADD(256, 128, "%128", "%129", "%130", "%131", "%132")

#undef IRIS_MULTIPLY_ADD

} // namespace iris::gemm

#endif
