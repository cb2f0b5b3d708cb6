// The product of whole matrices on sm_90a: C = A B of f16 or bf16, with sums in f32.
//
// A workgroup has three roles, and runs until no tile is left. One thread, the loader, copies slabs of
// A and B, DEPTH of the depth each, into a ring in shared memory. Consumers, warpgroups of 64 rows of
// the tile each, multiply the slabs, and pack the finished sums to elements. Store warps, one a consumer,
// copy staged chunks of these to C. So the ring is filled beyond the end of a tile, while its sums are
// packed, and HOLD lets the next tile begin before the chunks of the last are staged: one in the shadow
// of each of its first slabs.
//
// CLUSTER workgroups take tiles that lie one below the other. Each copies its own slab of A and a part
// of the slab of B that they have in common, which goes to all of them.
//
// Who waits for whom: the loader for all consumers of the cluster, before it fills a place of the ring
// again; a consumer for the bytes of a slab, and for its store warp, before it stages a chunk where an
// earlier one lay; a store warp for its consumer. Nobody waits in a circle: a consumer frees a place of
// the ring before it asks for the next but one, and store warps wait for nobody else. The loader alone has
// a deadline, since a clock in a consumer's wait costs it registers: it ends last, when all that it
// loaded was multiplied, and ends the launch with an error if that does not come to pass.
//
// This file is long because the roles are one type, which share the rings.
//
// Op, the class that says which product it is, has
//   tiles()              how many there are for a cluster to take
//   place(i, rank)       of the i-th, for a workgroup of the cluster
//   slabs()              how many there are in the depth
//   finish(place, group, sums)  what is done to the sums before they are rounded
//   prefetch()           of its maps
//   addends(place)       how many matrices are added to a tile, and ADDS, whether there are any
//   SPREADS              whether held chunks are stored evenly over the next tile
//   STAYS                whether the one tile of a workgroup stays in shared memory, for all of its threads
//   BEHIND_OPEN          whether the launch ahead is the one that opens a call. That one lets this begin only when
//                        all ahead of itself is over, so factors may be copied to shared memory, and multiplied,
//                        while it still waits for peers. Who stores takes its turn, in each workgroup, so that this
//                        launch is not over before that one; a Loader does before it waits for peers, and whoever
//                        reads memory by loads, which a cache of this multiprocessor might answer
// and two classes that single threads make of it: Loader, with
//   run(place, number)   where the slabs of a tile lie from this one on: it may wait until they are there
//   addend(place, i)     where the tile lies in a matrix that is added: likewise
// and Storer, with
//   store(from, place, group, chunk)  stores a chunk of a consumer's part
//   stored(place, group) called once the last chunk of that is under way
#ifndef IRIS_GEMM_CORE_H
#define IRIS_GEMM_CORE_H

#include "iris/gemm/sm90_ptx.h"
#include "iris/gemm/sm90_wgmma.h"

// The build, as iris_kernels::gemm_config::CoreConfig says: columns of a tile; consumers; workgroups of a
// cluster; places in the ring; bytes of a line of a slab; whether the depth goes from line to line of A and
// of B; whether chunks are held; whether what is multiplied is C transposed = B transposed * A transposed,
// for few rows of C, which then are columns of a tile.
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

namespace iris::gemm {

constexpr u32 WIDTH = IRIS_GEMM_WIDTH, GROUPS = IRIS_GEMM_GROUPS, CLUSTER = IRIS_GEMM_CLUSTER;
constexpr u32 STAGES = IRIS_GEMM_STAGES;
constexpr bool A_ACROSS = IRIS_GEMM_A_ACROSS, B_ACROSS = IRIS_GEMM_B_ACROSS;
constexpr bool HOLD = IRIS_GEMM_HOLD, FLIPPED = IRIS_GEMM_FLIPPED;
/// Rows of a consumer, and of a tile; columns of A and rows of B in a slab, which is a line: elements have
/// two bytes.
constexpr u32 GROUP_ROWS = 64, ROWS = GROUPS * GROUP_ROWS;
constexpr u32 LINE = IRIS_GEMM_SLAB_BYTES, DEPTH = LINE / 2;
static_assert(LINE == 128, "lines are as long as the swizzle");
/// Threads of a workgroup, and the loader, the first behind the consumers.
constexpr u32 CORE_THREADS = 128 * (GROUPS + 1), LOADER = 128 * GROUPS;

/// Operands lie in blocks of lines of 128 bytes, swizzled. If the depth goes from line to line, a block
/// has 64 rows or columns of the operand.
constexpr u32 BLOCK = DEPTH * LINE, B_BLOCKS = (WIDTH + 63) / 64;
constexpr u32 A_BYTES = ROWS * LINE, B_LOADED = B_ACROSS ? B_BLOCKS * BLOCK : WIDTH * LINE;
constexpr u32 B_BYTES = (B_LOADED + 1023) / 1024 * 1024, STAGE_BYTES = A_BYTES + B_BYTES;

/// Chunks in which a consumer's part of a tile is stored: columns of one, and its lines in shared memory.
constexpr u32 CHUNK_COLS = FLIPPED ? WIDTH : WIDTH % 64 == 0 ? 64 : 32, CHUNKS = WIDTH / CHUNK_COLS;
constexpr u32 CHUNK_LINE = FLIPPED ? LINE : CHUNK_COLS * 2;
constexpr u32 CHUNK_BYTES = GROUP_ROWS * CHUNK_COLS * 2, BUFFERS = 2;

/// What lies where in shared memory.
constexpr u32 STAGING = STAGES * STAGE_BYTES;
constexpr u32 BARRIERS = STAGING + GROUPS * BUFFERS * CHUNK_BYTES;
constexpr u32 SHARED_BYTES = BARRIERS + (2 * STAGES + 2 * GROUPS * BUFFERS) * 8 + 1024;

#ifdef IRIS_GEMM_SHARED_BYTES
static_assert(SHARED_BYTES == IRIS_GEMM_SHARED_BYTES, "what the host asks for");
#endif

/// Groups of products that may be under way when a place of the ring is freed: with few columns the sums
/// are looked at too soon for any.
constexpr u32 UNDER_WAY = WIDTH >= 128 ? 1 : 0;

/// Whether a consumer needs more registers than a third of all.
constexpr bool MANY_SUMS = GROUPS == 2 && WIDTH > 128;

static_assert(CHUNK_BYTES % 1024 == 0 && WIDTH % 16 == 0, "chunks begin where the swizzle does");
static_assert(!B_ACROSS || DEPTH % CLUSTER == 0, "each loads as many lines of B");
static_assert(B_ACROSS || WIDTH / CLUSTER * LINE % 1024 == 0, "parts of B begin where the swizzle does");
static_assert(!(FLIPPED && HOLD), "what is flipped is one chunk");

/// What is added lies in a place of the ring, so many of its chunks at a time.
constexpr u32 ADDED_BYTES = ROWS * LINE, ADDED_CHUNKS = 2;
static_assert(2 * ADDED_BYTES <= STAGE_BYTES || WIDTH < 128, "two chunks of a tile");

/// Where a tile begins.
struct Place {
    u32 row, col;
};

/// Slabs of a tile that lie in one place: which map of the left factor, the first row there, what columns of
/// the left factor and rows of the right one are beyond those that a slab's number says, and the number of the
/// first slab that is elsewhere.
struct Run {
    const TensorMap& left;
    u32 row, shift, depth, end;
};

/// Where a tile lies in a matrix that is added to it.
struct Addend {
    const TensorMap& map;
    u32 row, col;
};

/// A position in a ring of COUNT places, with the parity of its turn.
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
  public:
    IRIS_DEVICE Core(const Op& op, const TensorMap& b, u32 memory, u64 deadline_ns)
        : op(op), map_b(b), stages(memory), staging(memory + STAGING),
          full(memory + BARRIERS), empty(full + 8 * STAGES), chunk_full(empty + 8 * STAGES),
          chunk_empty(chunk_full + 8 * GROUPS * BUFFERS), deadline_ns(deadline_ns),
          rank(CLUSTER > 1 ? rank_in_cluster() : 0), first(blockIdx.x / CLUSTER),
          step(gridDim.x / CLUSTER) {}

    IRIS_DEVICE void run() {
        prepare();
        if constexpr (!Op::BEHIND_OPEN) port::take_turn();
        take_roles();
        // A workgroup that is gone could not be arrived at.
        if constexpr (CLUSTER > 1) {
            __syncwarp();
            meet_cluster();
        }
    }

    /// The same in two steps, of a tile that stays: all threads begin, and what is loaded first is under way while
    /// they do other things.
    IRIS_DEVICE void begin() {
        static_assert(Op::STAYS && CLUSTER == 1, "one tile, of one workgroup");
        prepare();
        port::take_turn();
        if (threadIdx.x != LOADER || first >= op.tiles()) return;
        const Place place = op.place(first, 0);
        const Run run = typename Op::Loader(op).run(place, 0);
        for (; loaded < STAGES && loaded < op.slabs(); ++loaded) {
            load_slab(run, loaded * DEPTH, place.col, loaded);
        }
    }
    IRIS_DEVICE void end() {
        take_roles();
        __syncthreads();
    }

    /// Eight bytes of a flipped tile that stays: of a row of C, from this byte on.
    IRIS_DEVICE u64 staged(u32 row, u32 byte) const {
        static_assert(FLIPPED, "a consumer has a line of each row");
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
            if (threadIdx.x % 32 == 0) {
                if (warp == 0) load();
                else if (!Op::STAYS && warp <= GROUPS) store(warp - 1);
            }
        } else {
            if constexpr (MANY_SUMS) take_registers<232>();
            consume(role);
        }
    }

    /// The loader's thread initialises the barriers. Without a cluster nobody but itself has to know of
    /// them before it begins to load.
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

    // The loader.

    IRIS_DEVICE void load() {
        typename Op::Loader loader(op);
        const u32 tiles = op.tiles(), slabs = op.slabs();
        Ring<STAGES> ring{0, 1};
        if constexpr (Op::STAYS) {
            for (u32 i = 0; i < loaded; ++i) ring.next();
        }
        for (u32 tile = first; tile < tiles; tile += step) {
            const Place place = op.place(tile, rank);
            for (u32 slab = Op::STAYS ? loaded : 0; slab < slabs;) {
                const Run run = loader.run(place, slab);
                for (; slab < run.end; ++slab) {
                    await_within(empty + 8 * ring.at, ring.parity);
                    load_slab(run, slab * DEPTH, place.col, ring.at);
                    ring.next();
                }
            }
            if constexpr (Op::ADDS) {
                for (u32 i = 0; i < op.addends(place); ++i) load_addend(loader.addend(place, i), ring);
            }
        }
        // Until all that was loaded is used, here and by the others of the cluster.
        for (u32 i = 0; i < STAGES; ++i) {
            await_within(empty + 8 * ring.at, ring.parity);
            ring.next();
        }
    }

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

    /// The tile's part of a matrix to be added, chunk by chunk: each workgroup of the cluster its own.
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

    /// The loader's wait, which ends the launch if nothing happens for too long.
    IRIS_DEVICE void await_within(u32 barrier, u32 parity) {
        if (is_over(barrier, parity)) return;
        const u64 began = port::now();
        while (!is_over(barrier, parity)) {
            if (port::now() - began > deadline_ns) give_up();
        }
    }

    // Consumers.

    IRIS_DEVICE static void await(u32 barrier, u32 parity) {
        while (!is_over(barrier, parity)) {
        }
    }

    IRIS_DEVICE void consume(u32 group) {
        const u32 tiles = op.tiles(), slabs = op.slabs();
        float sums[WIDTH / 2];
        u32 held[WIDTH / 4];
        bool holds = false;
        Ring<STAGES> ring{0, 0};
        Ring<BUFFERS> buffer{0, 1};
        for (u32 tile = first; tile < tiles; tile += step) {
            u32 slab = 0;
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
            IRIS_NO_UNROLL
            for (; slab < slabs; ++slab) {
                multiply(group, ring, sums, slab > 0);
                advance(ring, slab > 0);
            }
            await_products<0>();
            if constexpr (UNDER_WAY > 0) release(ring.at == 0 ? STAGES - 1 : ring.at - 1);
            hold_back(sums);
            const Place place = op.place(tile, rank);
            if constexpr (Op::ADDS) {
                for (u32 i = 0; i < op.addends(place); ++i) add(group, ring, sums);
            }
            op.finish(place, group, sums);
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

    /// Add what the loader brings of a matrix.
    IRIS_DEVICE void add(u32 group, Ring<STAGES>& ring, float (&sums)[WIDTH / 2]) {
        const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        IRIS_UNROLL
        for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
            if (chunk % ADDED_CHUNKS == 0) await(full + 8 * ring.at, ring.parity);
            const u32 from = stages + ring.at * STAGE_BYTES + chunk % ADDED_CHUNKS * ADDED_BYTES +
                             group * GROUP_ROWS * LINE;
            IRIS_UNROLL
            for (u32 unit = 0; unit < CHUNK_COLS / 16; ++unit) {
                // As stage lays them out.
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
                // All of the consumer have read before a copy fills the place again.
                publish_to_copies();
                meet_group(group);
                release(ring.at);
                ring.next();
            }
        }
    }

    /// Begin the product of the slab at the ring's position.
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

    /// Free the place of the slab whose product is known to be done, and go on to the next.
    IRIS_DEVICE void advance(Ring<STAGES>& ring, bool has_last) {
        await_products<UNDER_WAY>();
        if constexpr (UNDER_WAY > 0) {
            if (has_last) release(ring.at == 0 ? STAGES - 1 : ring.at - 1);
        } else {
            release(ring.at);
        }
        ring.next();
    }

    IRIS_DEVICE void release(u32 at) {
        const u32 thread = threadIdx.x % 128;
        if constexpr (CLUSTER > 1) {
            if (thread < CLUSTER) arrive_at(empty + 8 * at, thread);
        } else {
            if (thread == 0) arrive(empty + 8 * at);
        }
    }

    /// A block in shared memory, as the instruction wants it said: eight lines are 1024 bytes, and where
    /// the depth goes from line to line, the next 64 rows or columns are a block further on.
    template <bool ACROSS> IRIS_DEVICE static u64 describe(u32 address) {
        constexpr u64 EIGHT_LINES = 8 * LINE / 16, NEXT = ACROSS ? BLOCK / 16 : 1;
        constexpr u64 SWIZZLE_128 = 1ull << 62;
        return (address >> 4 & 0x3fff) | NEXT << 16 | EIGHT_LINES << 32 | SWIZZLE_128;
    }
    /// What a depth of 16 is apart, in 16 bytes.
    template <bool ACROSS> IRIS_DEVICE static constexpr u64 deeper() {
        return ACROSS ? 16 * LINE / 16 : 16 * 2 / 16;
    }

    /// Put a chunk of the packed sums where the store warp finds it.
    IRIS_DEVICE void stage(u32 group, Ring<BUFFERS>& buffer, u32 chunk,
                           const u32 (&held)[WIDTH / 4]) {
        const u32 number = group * BUFFERS + buffer.at;
        await(chunk_empty + 8 * number, buffer.parity);
        lay(staging + number * CHUNK_BYTES, chunk, held);
        publish_to_copies();
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(chunk_full + 8 * number);
        buffer.next();
    }

    IRIS_DEVICE void lay(u32 to, u32 chunk, const u32 (&held)[WIDTH / 4]) {
        const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        IRIS_UNROLL
        for (u32 unit = 0; unit < CHUNK_COLS / 16; ++unit) {
            // Of each 16 x 16 sums of the warp, a lane names 8 that lie side by side in C.
            u32 line, within;
            if constexpr (FLIPPED) {
                line = unit * 16 + lane % 8 + lane / 16 * 8;
                within = warp * 16 + lane / 8 % 2 * 8;
            } else {
                line = warp * 16 + lane % 16;
                within = unit * 16 + lane / 16 * 8;
            }
            u32 offset = line * CHUNK_LINE + within * 2;
            // The swizzle: 16-byte vectors change places by the number of the line.
            offset ^= offset >> 3 & (CHUNK_LINE == 128 ? 0x70 : 0x30);
            store_matrices<FLIPPED>(to + offset, held + (chunk * CHUNK_COLS / 16 + unit) * 4);
        }
    }

    // Store warps.

    IRIS_DEVICE void store(u32 group) {
        if constexpr (Op::BEHIND_OPEN) port::take_turn();
        typename Op::Storer storer(op);
        const u32 tiles = op.tiles();
        Ring<BUFFERS> buffer{0, 0};
        u32 last = 0;
        bool any = false;
        for (u32 tile = first; tile < tiles; tile += step) {
            const Place place = op.place(tile, rank);
            for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
                const u32 number = group * BUFFERS + buffer.at;
                await(chunk_full + 8 * number, buffer.parity);
                storer.store(staging + number * CHUNK_BYTES, place, group, chunk);
                end_stores();
                // The one before is read by now, or soon.
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
    const u32 rank, first, step;
    /// Slabs whose loads `begin` has begun.
    u32 loaded = 0;
};

} // namespace iris::gemm

#endif
