// Op classes of gemm/core.h for a GEMM without communication: order of tiles, bias, and stores to C.
#ifndef IRIS_GEMM_WHOLE_H
#define IRIS_GEMM_WHOLE_H

#include "iris/gemm/core.h"

namespace iris::gemm {

/// Arguments of a GEMM; same layout as iris_kernels::gemm::Arguments on the host. Rows and columns are those
/// of C, or of C transposed in a FLIPPED build. `bias` is an address, or 0.
struct Arguments {
    u64 bias;
    u64 deadline_ns;
    u32 rows, cols, depth;
    /// Number of cluster tiles along the rows, number of tiles along the columns, and number of cluster tiles
    /// that are taken along the rows before the next column (raster group).
    u32 row_units, col_tiles, group;
};

/// Start of the dynamic shared memory, aligned to the 1024 bytes that the 128-byte swizzle requires.
IRIS_DEVICE u32 dynamic_memory() {
    extern __shared__ unsigned char memory[];
    return (static_cast<u32>(__cvta_generic_to_shared(memory)) + 1023) / 1024 * 1024;
}

/// Starts to store a staged chunk at a row and column, which are columns and rows of C if FLIPPED.
IRIS_DEVICE void store_chunk(u32 from, const TensorMap& map, u32 row, u32 col) {
    if constexpr (FLIPPED) store_box(from, map, row, col);
    else store_box(from, map, col, row);
}

/// Op for a GEMM with local matrices and an optional bias; base of the fused GEMMs.
class Whole {
  public:
    static constexpr bool ADDS = false, IN_ORDER = false, SPREADS = false, STAYS = false, AFTER_OPEN = false;

    IRIS_DEVICE Whole(const Arguments& args, const TensorMap& a, const TensorMap& c)
        : args(args), map_a(a), map_c(c) {}

    IRIS_DEVICE u32 tiles() const { return args.row_units * args.col_tiles; }
    IRIS_DEVICE u32 slabs() const { return (args.depth + DEPTH - 1) / DEPTH; }
    IRIS_DEVICE u32 addends(const Place&) const { return 0; }
    IRIS_DEVICE void prefetch() const {
        prefetch_map(map_a);
        prefetch_map(map_c);
    }

    IRIS_DEVICE Place place(u32 tile, u32 rank) const {
        const Place unit = this->unit(tile);
        return Place{(unit.row * CLUSTER + rank) * ROWS, unit.col};
    }

    struct Loader {
        const Whole& of;
        IRIS_DEVICE explicit Loader(const Whole& of) : of(of) {}
        IRIS_DEVICE Run run(const Place& place, u32) const {
            return Run{of.map_a, place.row, 0, 0, of.slabs()};
        }
    };

    struct Storer {
        const Whole& of;
        IRIS_DEVICE explicit Storer(const Whole& of) : of(of) {}
        IRIS_DEVICE void store(u32 from, const Place& place, u32 group, u32 chunk) const {
            store_chunk(from, of.map_c, place.row + group * GROUP_ROWS, place.col + chunk * CHUNK_COLS);
        }
        IRIS_DEVICE void stored(const Place&, u32) const {}
    };

    /// Adds the bias of each column of C; columns of C are rows of the tile if FLIPPED.
    template <u32 COUNT> IRIS_DEVICE void finish(const Place& place, u32 group, float (&sums)[COUNT]) const {
        if (args.bias == 0) return;
        // The bias is read by loads, which must come after the previous launch. This thread may not have
        // waited for that launch yet.
        port::take_turn();
        const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        if constexpr (FLIPPED) {
            const u32 row = place.row + group * GROUP_ROWS + warp * 16 + lane / 4;
            const float low = bias_at(row, args.rows), high = bias_at(row + 8, args.rows);
            IRIS_UNROLL
            for (u32 i = 0; i < COUNT; ++i) sums[i] += i & 2 ? high : low;
        } else {
            IRIS_UNROLL
            for (u32 j = 0; j < COUNT / 4; ++j) {
                const u32 col = place.col + j * 8 + lane % 4 * 2;
                const float left = bias_at(col, args.cols), right = bias_at(col + 1, args.cols);
                sums[4 * j] += left;
                sums[4 * j + 1] += right;
                sums[4 * j + 2] += left;
                sums[4 * j + 3] += right;
            }
        }
    }

  protected:
    /// Position of cluster tile number `tile`: its row, counted in cluster tiles, and its first column. The
    /// order goes down the columns of a raster group before the next group, so that tiles in flight share
    /// slabs of A and B in the L2 cache.
    IRIS_DEVICE Place unit(u32 tile) const {
        const u32 whole = args.group * args.col_tiles, group = tile / whole, within = tile % whole;
        const u32 begin = group * args.group, left = args.row_units - begin;
        const u32 height = left < args.group ? left : args.group;
        return Place{begin + within % height, within / height * WIDTH};
    }

    const Arguments& args;
    const TensorMap &map_a, &map_c;

  private:
    IRIS_DEVICE float bias_at(u32 index, u32 count) const {
        if (index >= count) return 0.0f;
        return load_element(args.bias + u64(element_bytes(IRIS_RESULT)) * index, IRIS_RESULT);
    }
};

/// Op for one tile per workgroup, which stays in shared memory. It adds no bias, because bias and epilogue
/// apply to the sum of the tiles of all ranks.
class Staying : public Whole {
  public:
    static constexpr bool STAYS = true;
    IRIS_DEVICE Staying(const Arguments& args, const TensorMap& a) : Whole(args, a, a) {}
    IRIS_DEVICE void finish(const Place&, u32, float (&)[WIDTH / 2]) const {}
};

/// Multiplies this workgroup's tiles of `op`, in dynamic shared memory.
template <class Op>
IRIS_DEVICE void multiply_whole(const Op& op, const TensorMap& b, u64 deadline_ns) {
    Core<Op>(op, b, dynamic_memory(), deadline_ns).run();
}

} // namespace iris::gemm

#define IRIS_GEMM_KERNEL                                                                           \
    extern "C" __global__ void __launch_bounds__(iris::gemm::CORE_THREADS, 1)                          \
        __cluster_dims__(iris::gemm::ALL_OF_CLUSTER, 1, 1)

#endif
