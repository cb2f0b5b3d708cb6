// Whole-matrix GEMM on sm_90a: C = A B with elements of f16 or bf16 and f32 sums, as a persistent kernel.
//
// The threads of a workgroup have three roles. The loader, one thread, is the producer: it copies slabs of A
// and B, DEPTH deep along K, by TMA into a ring of STAGES stages in shared memory. Each consumer, a
// warpgroup for 64 rows of the tile, multiplies the slabs by wgmma and packs the finished sums to elements.
// Store warps, one per consumer, copy staged chunks of the packed sums to C by TMA. While the sums of a tile
// are packed, the loader already fills the ring for the next tile. With HOLD (deferred stores) a consumer
// begins the next tile before it stages the packed sums, and stages one chunk during each of the next
// tile's first slabs.
//
// The CLUSTER workgroups of a cluster take tiles with the same columns, one below the other. Each loads its
// own slab of A and a part of their common slab of B, which is multicast to all of them.
//
// Waits: before the loader refills a stage, it waits for all consumers of the cluster. A consumer waits for
// the bytes of a slab, and, before it overwrites a staged chunk, for its store warp. A store warp waits only
// for its consumer. The waits form no cycle, because a consumer frees a stage before it waits for the next
// stage but one. Only the loader has a deadline, because a clock in a consumer's wait loop costs registers.
// The loader ends after all that it loaded has been multiplied, and traps if that takes too long.
//
// This file is long because all roles are in one class, which has the rings that they share.
//
// Members of Op, the class that defines a GEMM:
//   tiles()              number of units of work for clusters; a unit is one tile per workgroup of a cluster
//   place(i, rank)       position of the tile of workgroup `rank` of the cluster in unit `i`
//   slabs()              number of slabs along K
//   finish(place, group, sums)  change the f32 sums of a consumer before they are rounded (bias)
//   prefetch()           prefetch the tensor maps
//   addends(place)       number of matrices that are added to a tile
//   ADDS                 whether addends() can be more than 0
//   IN_ORDER             whether the parts of ranks are added in the order of ranks. Such an Op has three more
//                        members:
//   parts(place)         number of ranks whose parts are added to a tile, this rank's product among them: 0, or
//                        all ranks. addends() is one less, or as many if there is a residual.
//   own_part()           number of this rank
//   PAIR                 whether there are two ranks
//   SPREADS              whether deferred chunks are staged at equal intervals of the next tile's mainloop
//   STAYS                whether a workgroup has one tile, which stays in shared memory for all its threads
//   AFTER_OPEN           whether the previous launch on the stream is flow::open(), which lets this launch
//                        begin only after all earlier work on the stream has ended. So A and B may be loaded
//                        and multiplied while flow::open() still waits for peers. port::take_turn() waits
//                        until flow::open() has ended. These threads call it: store warps, so that this
//                        launch does not end first; a Loader before it waits for peers; and a thread before
//                        it reads memory by loads, which the L1 cache could answer with old data
// Classes that Op contains; single threads construct them from an Op. Members of Loader:
//   run(place, number)   slabs of a tile from slab `number` on, as a Run; may wait until they have arrived
//   addend(place, i)     position of the tile in addend `i`; may wait until the addend has arrived
// Members of Storer:
//   store(from, place, group, chunk)  begin to store a staged chunk of a consumer's part of a tile
//   stored(place, group) called after store() of the last chunk of a consumer's part
#ifndef IRIS_GEMM_CORE_H
#define IRIS_GEMM_CORE_H

#include "iris/gemm/sm90_ptx.h"
#include "iris/gemm/sm90_wgmma.h"

// Compile-time parameters, which iris_kernels::gemm_config::CoreConfig chooses. WIDTH: columns of a tile.
// GROUPS: consumer warpgroups. CLUSTER: workgroups per cluster. STAGES: stages of the ring. SLAB_BYTES: bytes
// of a line of a slab. A_ACROSS, B_ACROSS: whether K is the strided dimension of the left and of the right
// factor. HOLD: whether stores are deferred. FLIPPED: whether the kernel computes C^T = B^T A^T, for few rows
// of C, which become columns of a tile; the left factor is then B^T. PARTS: number of ranges of K whose products
// are added in the order of K. If FLIPPED, each workgroup of a cluster multiplies one range, for few tiles on many
// multiprocessors; otherwise a workgroup multiplies all ranges and adds each as it ends. The bits are the same.
#ifndef IRIS_GEMM_WIDTH
#define IRIS_GEMM_WIDTH 256
#endif
#ifndef IRIS_GEMM_GROUPS
#define IRIS_GEMM_GROUPS 2
#endif
#ifndef IRIS_GEMM_CLUSTER
#define IRIS_GEMM_CLUSTER 2
#endif
#ifndef IRIS_GEMM_STAGES
#define IRIS_GEMM_STAGES 4
#endif
#ifndef IRIS_GEMM_SLAB_BYTES
#define IRIS_GEMM_SLAB_BYTES 128
#endif
#ifndef IRIS_GEMM_A_ACROSS
#define IRIS_GEMM_A_ACROSS 0
#endif
#ifndef IRIS_GEMM_B_ACROSS
#define IRIS_GEMM_B_ACROSS 1
#endif
#ifndef IRIS_GEMM_HOLD
#define IRIS_GEMM_HOLD 1
#endif
#ifndef IRIS_GEMM_FLIPPED
#define IRIS_GEMM_FLIPPED 0
#endif
#ifndef IRIS_GEMM_PARTS
#define IRIS_GEMM_PARTS 1
#endif

namespace iris::gemm {

constexpr u32 WIDTH = IRIS_GEMM_WIDTH, GROUPS = IRIS_GEMM_GROUPS, CLUSTER = IRIS_GEMM_CLUSTER;
constexpr u32 STAGES = IRIS_GEMM_STAGES;
constexpr bool A_ACROSS = IRIS_GEMM_A_ACROSS, B_ACROSS = IRIS_GEMM_B_ACROSS;
constexpr bool HOLD = IRIS_GEMM_HOLD, FLIPPED = IRIS_GEMM_FLIPPED;
constexpr u32 PARTS = IRIS_GEMM_PARTS;
/// Number of workgroups that multiply a tile together, each a range of K, and number of all workgroups of a
/// cluster.
constexpr u32 SHARERS = FLIPPED ? PARTS : 1, ALL_OF_CLUSTER = CLUSTER * SHARERS;
/// Number of rows per consumer and per tile.
constexpr u32 GROUP_ROWS = 64, ROWS = GROUPS * GROUP_ROWS;
/// Bytes of a line of a slab, and depth of a slab along K in elements.
constexpr u32 LINE = IRIS_GEMM_SLAB_BYTES, DEPTH = LINE / Dtype<IRIS_FACTOR>::BYTES;
static_assert(LINE == 128, "a line must be as long as the swizzle, 128 bytes");
/// Number of threads per workgroup, and index of the loader, the first thread after the consumers.
constexpr u32 CORE_THREADS = 128 * (GROUPS + 1), LOADER = 128 * GROUPS;

/// Bytes of a slab of A and of B in shared memory. Lines have 128 bytes and are swizzled. If K is the strided
/// dimension, a line has 64 rows of A or columns of B, and DEPTH such lines form a block of BLOCK bytes; B
/// has B_BLOCKS of them. B_LOADED is what the loads write, B_BYTES the same rounded up to 1024.
constexpr u32 BLOCK = DEPTH * LINE, B_BLOCKS = (WIDTH + 63) / 64;
constexpr u32 A_BYTES = ROWS * LINE, B_LOADED = B_ACROSS ? B_BLOCKS * BLOCK : WIDTH * LINE;
constexpr u32 B_BYTES = (B_LOADED + 1023) / 1024 * 1024, STAGE_BYTES = A_BYTES + B_BYTES;

/// A chunk is the unit of stores: GROUP_ROWS rows x CHUNK_COLS columns of a consumer's part of a tile. In
/// shared memory its lines have CHUNK_LINE bytes. A consumer has BUFFERS buffers for staged chunks.
/// The workgroups that share a tile finish its chunks in turns.
constexpr u32 CHUNK_COLS = SHARERS > 1 ? 16 : FLIPPED ? WIDTH : WIDTH % 64 == 0 ? 64 : 32;
constexpr u32 CHUNKS = WIDTH / CHUNK_COLS;
constexpr u32 CHUNK_LINE = FLIPPED ? LINE : CHUNK_COLS * 2;
constexpr u32 CHUNK_BYTES = GROUP_ROWS * CHUNK_COLS * 2, BUFFERS = 2;

/// Offsets of the staging buffers and the mbarriers in shared memory after the ring, and total size in bytes.
constexpr u32 STAGING = STAGES * STAGE_BYTES;
constexpr u32 BARRIERS = STAGING + GROUPS * BUFFERS * CHUNK_BYTES;
constexpr u32 SHARED_BYTES = BARRIERS + (2 * STAGES + 2 * GROUPS * BUFFERS) * 8 + 1024;

#ifdef IRIS_GEMM_SHARED_BYTES
static_assert(SHARED_BYTES == IRIS_GEMM_SHARED_BYTES, "the host requests another size of shared memory");
#endif

/// Number of wgmma groups in flight when a consumer frees a stage. With few columns it is 0: with 1, ptxas
/// moved reads of the sums above the last wait, which gave wrong results.
constexpr u32 UNDER_WAY = WIDTH >= 128 ? 1 : 0;

/// Whether a consumer needs more registers per thread than a third of the register file provides.
constexpr bool MANY_SUMS = GROUPS == 2 && WIDTH > 128;

static_assert(CHUNK_BYTES % 1024 == 0 && WIDTH % 16 == 0,
              "chunks must begin at a period of the swizzle, 1024 bytes");
static_assert(!B_ACROSS || DEPTH % CLUSTER == 0, "workgroups of a cluster must load equally many lines of B");
static_assert(B_ACROSS || WIDTH / CLUSTER * LINE % 1024 == 0,
              "parts of B must begin at a period of the swizzle, 1024 bytes");
static_assert(!(FLIPPED && HOLD), "a flipped tile is one chunk, so its store is not deferred");
static_assert(PARTS == 1 || !HOLD, "stores are deferred over whole tiles only");
static_assert(SHARERS == 1 || CLUSTER == 1, "a cluster shares either slabs of B or tiles");

/// An addend (a matrix that is added to the tiles) is loaded in chunks of columns, through the ring: bytes of
/// a chunk for all rows of a tile, and number of chunks per stage.
constexpr u32 ADDED_BYTES = ROWS * LINE, ADDED_CHUNKS = 2;
static_assert(2 * ADDED_BYTES <= STAGE_BYTES || WIDTH < 128, "a stage must hold two chunks of the addend");

/// First row and first column of a tile.
struct Place {
    u32 row, col;
};

/// Consecutive slabs of a tile whose A (left factor) is in one tensor map, `left`. `row` is the tile's first
/// row there. Slab s begins at column s * DEPTH + `shift` of A and at row s * DEPTH + `depth` of B. `end` is
/// the number of the first slab after the run.
struct Run {
    const TensorMap& left;
    u32 row, shift, depth, end;
};

/// Position of a tile in a matrix that is added to it: tensor map, first row and first column.
struct Addend {
    const TensorMap& map;
    u32 row, col;
};

/// Position in a ring of COUNT stages or buffers, with the parity of the mbarrier phase to wait for.
template <u32 COUNT> struct Ring {
    u32 at, parity;
    IRIS_DEVICE void next() {
        if (++at == COUNT) {
            at = 0;
            parity ^= 1;
        }
    }
};

template <class Op> class Core {
    static_assert(!Op::ADDS || (CHUNK_COLS == 64 && CHUNKS % ADDED_CHUNKS == 0),
                  "add() frees a stage after every ADDED_CHUNKS chunks of 64 columns");

  public:
    IRIS_DEVICE Core(const Op& op, const TensorMap& b, u32 memory, u64 deadline_ns)
        : op(op), map_b(b), stages(memory), staging(memory + STAGING),
          full(memory + BARRIERS), empty(full + 8 * STAGES), chunk_full(empty + 8 * STAGES),
          chunk_empty(chunk_full + 8 * GROUPS * BUFFERS), deadline_ns(deadline_ns),
          rank(CLUSTER > 1 ? rank_in_cluster() : 0), share(SHARERS > 1 ? rank_in_cluster() : 0),
          first(blockIdx.x / ALL_OF_CLUSTER), step(gridDim.x / ALL_OF_CLUSTER) {}

    IRIS_DEVICE void run() {
        prepare();
        if constexpr (!Op::AFTER_OPEN) port::take_turn();
        take_roles();
        // A workgroup must not exit while others of the cluster may still arrive at its mbarriers or read its
        // sums.
        if constexpr (ALL_OF_CLUSTER > 1) {
            __syncwarp();
            meet_cluster();
        }
    }

    /// First half of run() for an Op whose only tile stays in shared memory (STAYS). All threads call it. It
    /// starts to load the first slabs, which are in flight while the threads do other work. end() is the
    /// second half.
    IRIS_DEVICE void begin() {
        static_assert(Op::STAYS && ALL_OF_CLUSTER == 1,
                      "an operator that stays has one tile per workgroup, without clusters");
        prepare();
        port::take_turn();
        if (threadIdx.x != LOADER || first >= op.tiles()) return;
        const Place place = op.place(first, 0);
        const Run run = typename Op::Loader(op).run(place, 0);
        for (; loaded < STAGES && loaded < op.slabs(); ++loaded) {
            load_slab(run, loaded * DEPTH, place.col, loaded);
        }
    }
    /// Finishes the tile; then all threads may call staged().
    IRIS_DEVICE void end() {
        take_roles();
        __syncthreads();
    }

    /// Returns eight bytes of the finished tile, after end(), in a build that computes the transpose of C
    /// (FLIPPED): bytes `byte` to `byte` + 7 of the tile's part of row `row` of C.
    IRIS_DEVICE u64 staged(u32 row, u32 byte) const {
        static_assert(FLIPPED, "only flipped tiles have one line per row");
        u32 offset = row * LINE + byte % LINE;
        offset ^= offset >> 3 & 0x70;
        return load_shared(staging + byte / LINE * BUFFERS * CHUNK_BYTES + offset);
    }

  private:
    IRIS_DEVICE void take_roles() {
        const u32 role = threadIdx.x / 128;
        if (role == GROUPS) {
            if constexpr (MANY_SUMS) leave_registers<40>();
            const u32 warp = threadIdx.x / 32 - LOADER / 32;
            const bool leads = threadIdx.x % 32 == 0;
            if constexpr (SHARERS > 1) {
                if (leads && warp == 0) load();
                __syncwarp();
                meet_cluster();
                if (leads && warp > 0 && warp <= GROUPS) store(warp - 1);
            } else if (leads) {
                if (warp == 0) load();
                else if (!Op::STAYS && warp <= GROUPS) store(warp - 1);
            }
        } else {
            if constexpr (MANY_SUMS) take_registers<232>();
            consume(role);
        }
    }

    /// Initialises the mbarriers (loader) and prefetches the tensor maps. Without a cluster, the loader's
    /// warp arrives at the workgroup's barrier but does not wait there: it may begin to load before the other
    /// threads know of the mbarriers.
    IRIS_DEVICE void prepare() {
        if (threadIdx.x == LOADER) {
            for (u32 i = 0; i < STAGES; ++i) {
                init_barrier(full + 8 * i, 1);
                init_barrier(empty + 8 * i, GROUPS * CLUSTER);
            }
            for (u32 i = 0; i < GROUPS * BUFFERS; ++i) {
                init_barrier(chunk_full + 8 * i, 128 / 32);
                init_barrier(chunk_empty + 8 * i, 1);
            }
            publish_barriers();
        } else if (threadIdx.x == LOADER + 32) {
            op.prefetch();
            prefetch_map(map_b);
        }
        __syncwarp();
        if constexpr (CLUSTER > 1) meet_cluster();
        else if (threadIdx.x / 32 == LOADER / 32) come<CORE_THREADS>();
        else meet<CORE_THREADS>();
    }

    /// Number of slabs in a range of K; the last range may have fewer, and no range is empty.
    IRIS_DEVICE u32 range() const { return (op.slabs() + PARTS - 1) / PARTS; }
    /// First slab of this workgroup, and the slab after its last.
    IRIS_DEVICE u32 begins() const { return SHARERS > 1 ? share * range() : 0; }
    IRIS_DEVICE u32 ends() const {
        const u32 slabs = op.slabs(), end = begins() + range();
        return SHARERS > 1 && end < slabs ? end : slabs;
    }

    /// First chunk of a consumer's part of a tile that this workgroup finishes. Consumers begin at different
    /// workgroups, so that all have work if there are fewer chunks than workgroups.
    IRIS_DEVICE u32 first_chunk(u32 group) const { return (share + group * CHUNKS) % SHARERS; }

    // Loader.

    IRIS_DEVICE void load() {
        typename Op::Loader loader(op);
        const u32 tiles = op.tiles(), slabs = ends();
        Ring<STAGES> ring{0, 1};
        if constexpr (Op::STAYS) {
            for (u32 i = 0; i < loaded; ++i) ring.next();
        }
        for (u32 tile = first; tile < tiles; tile += step) {
            const Place place = op.place(tile, rank);
            for (u32 slab = begins() + loaded; slab < slabs;) {
                const Run run = loader.run(place, slab);
                // Only the range of a workgroup that shares a tile may end before the run.
                const u32 end = SHARERS > 1 && slabs < run.end ? slabs : run.end;
                for (; slab < end; ++slab) {
                    await_within(empty + 8 * ring.at, ring.parity);
                    load_slab(run, slab * DEPTH, place.col, ring.at);
                    ring.next();
                }
            }
            if constexpr (Op::ADDS) {
                for (u32 i = 0; i < op.addends(place); ++i) load_addend(loader.addend(place, i), ring);
            }
        }
        // Wait until the consumers of all workgroups of the cluster have freed all stages.
        for (u32 i = 0; i < STAGES; ++i) {
            await_within(empty + 8 * ring.at, ring.parity);
            ring.next();
        }
    }

    /// Starts to load a slab of `run` into stage `at`. `from` is DEPTH times the slab's number, `cols`
    /// the first column of the tile.
    IRIS_DEVICE void load_slab(const Run& run, u32 from, u32 cols, u32 at) {
        const u32 left = from + run.shift, depth = from + run.depth;
        const u32 a = stages + at * STAGE_BYTES, b = a + A_BYTES, barrier = full + 8 * at;
        arrive_expecting(barrier, A_BYTES + B_LOADED);
        if constexpr (A_ACROSS) {
            IRIS_UNROLL
            for (u32 i = 0; i < GROUPS; ++i) {
                load_box(a + i * BLOCK, run.left, barrier, run.row + i * 64, left);
            }
        } else {
            load_box(a, run.left, barrier, left, run.row);
        }
        constexpr u16 ALL = (1 << CLUSTER) - 1;
        if constexpr (B_ACROSS) {
            constexpr u32 LINES = DEPTH / CLUSTER;
            const u32 part = rank * LINES;
            IRIS_UNROLL
            for (u32 i = 0; i < B_BLOCKS; ++i) {
                const u32 to = b + i * BLOCK + part * LINE, col = cols + i * 64;
                if constexpr (CLUSTER > 1) load_box_to(ALL, to, map_b, barrier, col, depth + part);
                else load_box(to, map_b, barrier, col, depth);
            }
        } else {
            const u32 part = rank * (WIDTH / CLUSTER), to = b + part * LINE;
            if constexpr (CLUSTER > 1) load_box_to(ALL, to, map_b, barrier, depth, cols + part);
            else load_box(to, map_b, barrier, depth, cols);
        }
    }

    /// Starts to load the tile's part of an addend, ADDED_CHUNKS chunks per stage, without multicast.
    IRIS_DEVICE void load_addend(const Addend& from, Ring<STAGES>& ring) {
        IRIS_NO_UNROLL
        for (u32 chunk = 0; chunk < CHUNKS; chunk += ADDED_CHUNKS) {
            await_within(empty + 8 * ring.at, ring.parity);
            const u32 to = stages + ring.at * STAGE_BYTES, barrier = full + 8 * ring.at;
            arrive_expecting(barrier, ADDED_CHUNKS * ADDED_BYTES);
            IRIS_UNROLL
            for (u32 i = 0; i < ADDED_CHUNKS; ++i) {
                load_box(to + i * ADDED_BYTES, from.map, barrier, from.col + (chunk + i) * CHUNK_COLS, from.row);
            }
            ring.next();
        }
    }

    /// Wait of the loader for a phase of an mbarrier; traps after `deadline_ns`.
    IRIS_DEVICE void await_within(u32 barrier, u32 parity) {
        if (is_over(barrier, parity)) return;
        const u64 began = port::now();
        while (!is_over(barrier, parity)) {
            if (port::now() - began > deadline_ns) trap();
        }
    }

    // Consumers.

    IRIS_DEVICE static void await(u32 barrier, u32 parity) {
        while (!is_over(barrier, parity)) {
        }
    }

    IRIS_DEVICE void consume(u32 group) {
        const u32 tiles = op.tiles(), slabs = ends();
        float sums[WIDTH / 2];
        u32 held[WIDTH / 4];
        bool holds = false;
        Ring<STAGES> ring{0, 0};
        Ring<BUFFERS> buffer{0, 1};
        for (u32 tile = first; tile < tiles; tile += step) {
            u32 slab = begins();
            if constexpr (HOLD) {
                IRIS_UNROLL
                for (u32 chunk = 0; chunk < CHUNKS; ++chunk, ++slab) {
                    multiply(group, ring, sums, chunk > 0);
                    if (holds) stage(group, buffer, chunk, held);
                    advance(ring, chunk > 0);
                    if constexpr (Op::SPREADS) {
                        IRIS_NO_UNROLL
                        for (u32 end = slab + (slabs - CHUNKS) / CHUNKS; slab < end; ++slab) {
                            multiply(group, ring, sums, true);
                            advance(ring, true);
                        }
                    }
                }
            }
            if constexpr (PARTS > 1 && SHARERS == 1) {
                float part[WIDTH / 2];
                IRIS_NO_UNROLL
                for (u32 end = 0; slab < slabs;) {
                    const u32 begin = slab;
                    end = begin + range() < slabs ? begin + range() : slabs;
                    multiply_slabs(group, ring, part, slab, begin, end);
                    IRIS_UNROLL
                    for (u32 i = 0; i < WIDTH / 2; ++i) sums[i] = begin == 0 ? part[i] : sums[i] + part[i];
                }
            } else {
                multiply_slabs(group, ring, sums, slab, begins(), slabs);
            }
            const Place place = op.place(tile, rank);
            if constexpr (SHARERS > 1) {
                // A cluster has one tile.
                return finish_together(place, group, buffer, sums);
            }
            if constexpr (Op::IN_ORDER) {
                add_in_order(place, group, ring, sums, held);
            } else {
                if constexpr (Op::ADDS) {
                    for (u32 i = 0; i < op.addends(place); ++i) add(group, ring, sums);
                }
                op.finish(place, group, sums);
            }
            IRIS_UNROLL
            for (u32 i = 0; i < WIDTH / 4; ++i) held[i] = pack(sums[2 * i], sums[2 * i + 1]);
            if constexpr (HOLD) {
                holds = true;
            } else if constexpr (Op::STAYS) {
                lay(staging + group * BUFFERS * CHUNK_BYTES, 0, held);
            } else {
                IRIS_UNROLL
                for (u32 chunk = 0; chunk < CHUNKS; ++chunk) stage(group, buffer, chunk, held);
            }
        }
        if (HOLD && holds) {
            IRIS_UNROLL
            for (u32 chunk = 0; chunk < CHUNKS; ++chunk) stage(group, buffer, chunk, held);
        }
    }

    /// Multiplies slabs from `slab` to `end`, which it adds to the sums; the sums start from 0 at slab `begin`.
    IRIS_DEVICE void multiply_slabs(u32 group, Ring<STAGES>& ring, float (&sums)[WIDTH / 2], u32& slab, u32 begin,
                                    u32 end) {
        IRIS_NO_UNROLL
        for (; slab < end; ++slab) {
            multiply(group, ring, sums, slab > begin);
            advance(ring, slab > begin);
        }
        await_products<0>();
        if constexpr (UNDER_WAY > 0) release(ring.at == 0 ? STAGES - 1 : ring.at - 1);
        hold_back(sums);
    }

    /// Adds the sums of all workgroups of the cluster in the order of K, each workgroup some chunks of the tile.
    /// The sums lie in the ring, which has nothing left to multiply: 16 bytes of each thread side by side.
    IRIS_DEVICE void finish_together(const Place& place, u32 group, Ring<BUFFERS>& buffer,
                                     const float (&sums)[WIDTH / 2]) {
        // 16 bytes of each consumer thread.
        constexpr u32 STEP = GROUPS * 128 * 16;
        static_assert(STEP * WIDTH / 8 <= STAGING, "the ring must hold the sums of a tile");
        const u32 at = stages + threadIdx.x * 16;
        // Another warp's wgmma may still read the ring.
        meet<128 * GROUPS>();
        IRIS_UNROLL
        for (u32 i = 0; i < WIDTH / 8; ++i) store_four(at + i * STEP, sums + 4 * i);
        publish_to_cluster();
        IRIS_NO_UNROLL
        for (u32 chunk = first_chunk(group); chunk < CHUNKS; chunk += SHARERS) {
            float parts[SHARERS][8], (&all)[8] = parts[0];
            IRIS_UNROLL
            for (u32 of = 0; of < SHARERS; ++of) {
                load_four_of(of, at + 2 * chunk * STEP, parts[of]);
                load_four_of(of, at + (2 * chunk + 1) * STEP, parts[of] + 4);
            }
            IRIS_UNROLL
            for (u32 of = 1; of < SHARERS; ++of) {
                IRIS_UNROLL
                for (u32 i = 0; i < 8; ++i) all[i] += parts[of][i];
            }
            op.finish(place, group, all);
            u32 held[4];
            IRIS_UNROLL
            for (u32 i = 0; i < 4; ++i) held[i] = pack(all[2 * i], all[2 * i + 1]);
            stage(group, buffer, 0, held);
        }
    }

    /// Adds the parts of all ranks to a tile in the order of ranks. The sums are this rank's own part, which is
    /// rounded first, as peers rounded theirs before they sent them. Then op.finish(), then the residual. `own`
    /// has no value before and after.
    IRIS_DEVICE void add_in_order(const Place& place, u32 group, Ring<STAGES>& ring, float (&sums)[WIDTH / 2],
                                  u32 (&own)[WIDTH / 4]) {
        const u32 parts = op.parts(place), me = op.own_part();
        // a + b has the bits of b + a, so the own part of the first two ranks may come first. Then it needs no
        // registers beside the sums.
        const bool first = Op::PAIR || me < 2;
        if (parts > 0) {
            IRIS_UNROLL
            for (u32 i = 0; i < WIDTH / 4; ++i) {
                own[i] = pack(sums[2 * i], sums[2 * i + 1]);
                // -0.0 is the neutral element: a sum of -0.0 that starts from 0.0 would become 0.0.
                sums[2 * i] = first ? low_of(own[i]) : -0.0f;
                sums[2 * i + 1] = first ? high_of(own[i]) : -0.0f;
            }
        }
        IRIS_NO_UNROLL
        for (u32 part = 0; part < parts; ++part) {
            if (part != me) {
                add(group, ring, sums);
            } else if (!first) {
                IRIS_UNROLL
                for (u32 i = 0; i < WIDTH / 4; ++i) {
                    sums[2 * i] += low_of(own[i]);
                    sums[2 * i + 1] += high_of(own[i]);
                }
            }
        }
        op.finish(place, group, sums);
        if (parts > 0 && op.addends(place) == parts) add(group, ring, sums);
    }

    /// Adds an addend, which the loader brings through the ring, to the sums.
    IRIS_DEVICE void add(u32 group, Ring<STAGES>& ring, float (&sums)[WIDTH / 2]) {
        const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        IRIS_UNROLL
        for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
            if (chunk % ADDED_CHUNKS == 0) await(full + 8 * ring.at, ring.parity);
            const u32 from = stages + ring.at * STAGE_BYTES + chunk % ADDED_CHUNKS * ADDED_BYTES +
                             group * GROUP_ROWS * LINE;
            IRIS_UNROLL
            for (u32 unit = 0; unit < CHUNK_COLS / 16; ++unit) {
                // The layout is that of lay() with lines of 128 bytes.
                const u32 line = warp * 16 + lane % 16;
                u32 offset = line * LINE + unit * 32 + lane / 16 * 16, words[4];
                offset ^= offset >> 3 & 0x70;
                load_matrices(from + offset, words);
                IRIS_UNROLL
                for (u32 i = 0; i < 4; ++i) {
                    const u32 at = (chunk * CHUNK_COLS / 16 + unit) * 8 + 2 * i;
                    sums[at] += low_of(words[i]);
                    sums[at + 1] += high_of(words[i]);
                }
            }
            if (chunk % ADDED_CHUNKS + 1 == ADDED_CHUNKS) {
                // All threads of the consumer must have read the stage before a copy refills it.
                publish_to_copies();
                meet_group(group);
                release(ring.at);
                ring.next();
            }
        }
    }

    /// Waits for the slab at the ring's position and issues its wgmmas as one group. If `keep` is false, the
    /// sums start from 0.
    IRIS_DEVICE void multiply(u32 group, const Ring<STAGES>& ring, float (&sums)[WIDTH / 2],
                              bool keep) {
        await(full + 8 * ring.at, ring.parity);
        const u32 from = stages + ring.at * STAGE_BYTES;
        const u64 a = describe<A_ACROSS>(from + group * BLOCK), b = describe<B_ACROSS>(from + A_BYTES);
        begin_products();
        IRIS_UNROLL
        for (u32 i = 0; i < DEPTH / 16; ++i) {
            multiply_add<A_ACROSS, B_ACROSS>(sums, a + i * deeper<A_ACROSS>(),
                                             b + i * deeper<B_ACROSS>(), i > 0 || keep);
        }
        end_products();
    }

    /// Frees a stage whose product is complete, and moves to the next stage. The freed stage is the current
    /// one if UNDER_WAY is 0, else the one before it, if there is one (`has_last`).
    IRIS_DEVICE void advance(Ring<STAGES>& ring, bool has_last) {
        await_products<UNDER_WAY>();
        if constexpr (UNDER_WAY > 0) {
            if (has_last) release(ring.at == 0 ? STAGES - 1 : ring.at - 1);
        } else {
            release(ring.at);
        }
        ring.next();
    }

    /// Frees stage `at` for the loaders of all workgroups of the cluster.
    IRIS_DEVICE void release(u32 at) {
        const u32 thread = threadIdx.x % 128;
        if constexpr (CLUSTER > 1) {
            if (thread < CLUSTER) arrive_at(empty + 8 * at, thread);
        } else {
            if (thread == 0) arrive(empty + 8 * at);
        }
    }

    /// Matrix descriptor of wgmma for a block at `address`. Bits 0 to 13 are the start address, bits 16 to 29
    /// the leading byte offset, bits 32 to 45 the stride byte offset, each divided by 16; bit 62 selects the
    /// 128-byte swizzle. The stride is that of eight lines, 1024 bytes. The leading offset is the distance of
    /// the blocks of 64 rows or columns if ACROSS (K is strided); otherwise it is unused.
    template <bool ACROSS> IRIS_DEVICE static u64 describe(u32 address) {
        constexpr u64 EIGHT_LINES = 8 * LINE / 16, NEXT = ACROSS ? BLOCK / 16 : 1;
        constexpr u64 SWIZZLE_128 = 1ull << 62;
        return (address >> 4 & 0x3fff) | NEXT << 16 | EIGHT_LINES << 32 | SWIZZLE_128;
    }
    /// Increment of a descriptor's start address from one K step of 16 to the next, in units of 16 bytes.
    template <bool ACROSS> IRIS_DEVICE static constexpr u64 deeper() {
        return ACROSS ? 16 * LINE / 16 : 16 * 2 / 16;
    }

    /// Waits until a staging buffer is free, writes a chunk of the packed sums there, and passes it to the
    /// store warp.
    IRIS_DEVICE void stage(u32 group, Ring<BUFFERS>& buffer, u32 chunk, const u32* held) {
        const u32 number = group * BUFFERS + buffer.at;
        await(chunk_empty + 8 * number, buffer.parity);
        lay(staging + number * CHUNK_BYTES, chunk, held);
        publish_to_copies();
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(chunk_full + 8 * number);
        buffer.next();
    }

    /// Writes a chunk of the packed sums to `to` in shared memory, in the layout of TMA stores.
    IRIS_DEVICE void lay(u32 to, u32 chunk, const u32* held) {
        const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        IRIS_UNROLL
        for (u32 unit = 0; unit < CHUNK_COLS / 16; ++unit) {
            // For each 16 x 16 block of the warp's sums, a lane passes to stmatrix the address of 8 elements
            // that are adjacent in C.
            u32 line, within;
            if constexpr (FLIPPED) {
                line = unit * 16 + lane % 8 + lane / 16 * 8;
                within = warp * 16 + lane / 8 % 2 * 8;
            } else {
                line = warp * 16 + lane % 16;
                within = unit * 16 + lane / 16 * 8;
            }
            u32 offset = line * CHUNK_LINE + within * 2;
            // Swizzle of the tensor map: bits of the line's number are XORed into the index of the 16-byte
            // vector.
            offset ^= offset >> 3 & (CHUNK_LINE == 128 ? 0x70 : 0x30);
            store_matrices<FLIPPED>(to + offset, held + (chunk * CHUNK_COLS / 16 + unit) * 4);
        }
    }

    // Store warps.

    IRIS_DEVICE void store(u32 group) {
        if constexpr (Op::AFTER_OPEN) port::take_turn();
        typename Op::Storer storer(op);
        const u32 tiles = op.tiles();
        Ring<BUFFERS> buffer{0, 0};
        u32 last = 0;
        bool any = false;
        for (u32 tile = first; tile < tiles; tile += step) {
            const Place place = op.place(tile, rank);
            for (u32 chunk = first_chunk(group); chunk < CHUNKS; chunk += SHARERS) {
                const u32 number = group * BUFFERS + buffer.at;
                await(chunk_full + 8 * number, buffer.parity);
                storer.store(staging + number * CHUNK_BYTES, place, group, chunk);
                end_stores();
                // Wait until the previous chunk's store has read its buffer, then free the buffer.
                await_reads<1>();
                if (any) arrive(chunk_empty + 8 * last);
                any = true;
                last = number;
                buffer.next();
            }
            storer.stored(place, group);
        }
        await_stores();
    }

    const Op& op;
    const TensorMap& map_b;
    const u32 stages, staging, full, empty, chunk_full, chunk_empty;
    const u64 deadline_ns;
    const u32 rank, share, first, step;
    /// Number of slabs that begin() has started to load.
    u32 loaded = 0;
};

} // namespace iris::gemm

#endif
