// Kernels that the stress test runs around an op: they fill its inputs and compare its output.
// Inputs are small integers that every rank can compute from call, rank and position. So sums are
// exact, nothing is sent for the comparison, and no host takes part.
#include "iris/view.h"

using namespace iris;

// Enums with the same values as those of oracle/meaning.rs, which describe the meaning of an op.
enum class Rows : u32 { All, Own, Blocks, Root, Shard, None };
enum class Product : u32 { None, First, Last };

struct Stress {
    HeapView heap;
    // Addresses of A (or the message), B and C on this rank.
    u64 a, b, c;
    // Report of wrong elements, in the data segment; the function report() documents its words.
    Slice<i32> report;
    // Words in the data segment that other ranks write. In a test of a barrier, `words` has one word per
    // rank. In the test of a ring of ranks, `words` has two signals, and `cargo` is the message.
    Slice<i32> words, cargo;
    u32 call, dtype, root;
    // Meaning of the op: whether its product comes before or after the communication, how the rows of the
    // input (`gives`) and of C (`gets`) are distributed over the ranks, and whether C is a sum over the
    // ranks.
    Product product;
    Rows gives, gets;
    u32 sums;
    // Shapes of A, B and C: this call has `rows` rows of C, and the block of C has room for `room`
    // rows.
    u32 a_rows, a_cols, b_rows, b_cols, rows, room, cols;
    // First row that each rank owns and, if A is split by columns, first column of A that it owns.
    u32 first_row[MAX_RANKS], first_col[MAX_RANKS];
};

enum Which : u32 { A, B };

/// Element of a rank's input: -1, 0 or 1 for factors, -8 to 8 for messages.
IRIS_DEVICE float input(const Stress& s, u32 rank, u32 which, u32 row, u32 col) {
    u32 x = s.call * 0x9e3779b1u ^ rank * 0x85ebca77u ^ which * 0xc2b2ae3du;
    x = (x ^ row * 0x27d4eb2fu ^ col * 0x165667b1u);
    x = (x ^ x >> 15) * 0x2c1b3c6du;
    x = (x ^ x >> 12) * 0x297a2d39u;
    x ^= x >> 15;
    const i32 most = s.product == Product::None ? 8 : 1;
    return static_cast<float>(static_cast<i32>(x % (2 * most + 1)) - most);
}

IRIS_DEVICE float not_a_number() { return __builtin_bit_cast(float, 0x7fc00000u); }

/// Delays one rank for a long time in one call of eight, so that the others run ahead as far as the
/// protocol lets them.
///
/// If a build stalls a rank that has received data (Hold::Received), the root is late in the first
/// call: the other ranks are then in the call, whenever their hosts started it, and see the root's
/// entry before the root runs ahead.
IRIS_DEVICE void straggle(const Stress& s) {
    hold<Hold::Filling>(s.heap.rank);
    if (static_cast<int>(Hold::Received) == IRIS_TEST_HOLD && s.call == 0 && s.heap.rank == s.root) {
        const u64 begun = port::now();
        while (port::now() - begun < 20ull * IRIS_TEST_HOLD_NS) port::sleep(1000);
    }
    const u32 mixed = (s.call >> 3) * 0x9e3779b1u;
    if ((s.call & 7) != 0 || (mixed >> 16) % s.heap.size != s.heap.rank) return;
    port::sleep(min_of(20u * IRIS_TEST_DELAY_NS, 500000u));
}

/// Rank that owns row (or column) `at`.
IRIS_DEVICE u32 owner(const u32 (&first)[MAX_RANKS], u32 size, u32 at) {
    u32 rank = 0;
    while (rank + 1 < size && at >= first[rank + 1]) ++rank;
    return rank;
}

/// Element of C in row `row` and column `col` that the op must compute on this rank.
IRIS_DEVICE float expected(const Stress& s, u32 row, u32 col) {
    const u32 me = s.heap.rank, size = s.heap.size;
    // Rank `source` that contributes the row (unless the row is a sum), and the index `there` of
    // the row in its contribution.
    u32 source = me, there = row;
    if (s.sums != 0) {
        if (s.gets == Rows::Own) there += s.first_row[me];
    } else if (s.gets == Rows::Blocks) {
        const u32 part = s.rows / size;
        source = row / part;
        there = s.first_row[me] + row % part;
    } else if (s.gives == Rows::Own || s.gives == Rows::Shard) {
        source = owner(s.first_row, size, row);
        there = row - s.first_row[source];
    } else if (s.gives == Rows::Root) {
        source = s.root;
    }
    float sum = 0.0f;
    if (s.product == Product::Last) {
        for (u32 k = 0; k < s.b_rows; ++k) {
            // A is split by rows or by columns. `by_col` is the rank that owns column `k`; it is 0
            // for all columns if A is split by rows.
            const u32 by_col = owner(s.first_col, size, k);
            const float a = s.a_cols == s.b_rows
                                ? input(s, source, A, there, k)
                                : input(s, by_col, A, row, k - s.first_col[by_col]);
            sum += a * input(s, me, B, k, col);
        }
        return sum;
    }
    for (u32 rank = 0; rank < size; ++rank) {
        if (s.sums == 0 && rank != source) continue;
        if (s.product == Product::None) sum += input(s, rank, A, there, col);
        for (u32 k = 0; s.product == Product::First && k < s.a_cols; ++k) {
            sum += input(s, rank, A, there, k) * input(s, rank, B, k, col);
        }
    }
    return sum;
}

/// Adds a wrong element to the report. Words: 0, number of wrong elements; 1, whether the first one
/// is recorded; 2 to 6, its call, row, column, actual and expected value as bits of f32; 7, number
/// of compared elements.
IRIS_DEVICE void report(const Stress& s, u32 row, u32 col, float seen, float wanted) {
    const auto words = s.heap.at(s.report, s.heap.rank);
    words.word(0).add<Order::Relaxed>(1);
    if (words.word(1).compare_exchange<Order::Relaxed>(0, 1) != 0) return;
    words.put(2, static_cast<i32>(s.call));
    words.put(3, static_cast<i32>(row));
    words.put(4, static_cast<i32>(col));
    words.put(5, __builtin_bit_cast(i32, seen));
    words.put(6, __builtin_bit_cast(i32, wanted));
}

/// Calls `each(row, col)` for every element, spread over the threads of all workgroups.
template <class Each> IRIS_DEVICE void for_each(u32 rows, u32 cols, Each each) {
    const u64 step = port::workgroups() * port::threads();
    for (u64 i = port::workgroup() * port::threads() + port::thread(); i < u64(rows) * cols; i += step) {
        each(static_cast<u32>(i / cols), static_cast<u32>(i % cols));
    }
}

/// Fills A and B with the input values of the call, and C and the gaps around it with NaN.
IRIS_KERNEL iris_stress_fill(IRIS_ARGS Stress s) {
    const u32 size = element_bytes(s.dtype);
    straggle(s);
    for_each(s.a_rows, s.a_cols, [&](u32 row, u32 col) {
        store_element(s.a + (u64(row) * s.a_cols + col) * size, s.dtype,
                      input(s, s.heap.rank, A, row, col));
    });
    for_each(s.b_rows, s.b_cols, [&](u32 row, u32 col) {
        store_element(s.b + (u64(row) * s.b_cols + col) * size, s.dtype,
                      input(s, s.heap.rank, B, row, col));
    });
    for_each(s.room, s.cols, [&](u32 row, u32 col) {
        store_element(s.c + (u64(row) * s.cols + col) * size, s.dtype, not_a_number());
    });
    if (s.gets != Rows::None || port::workgroup() != 0) return;
    // Test of a barrier: these plain stores to all ranks must be visible there after the barrier.
    for (u32 rank = port::thread(); rank < s.heap.size; rank += port::threads()) {
        s.heap.at(s.words, rank).put(s.heap.rank * LINE_WORDS, static_cast<i32>(s.call));
    }
}

/// Whether this rank has a fault, so that its calls since then have no result. The fault record is
/// in host memory, so it is read only if the abort word, which is in this rank's own memory, is
/// set.
IRIS_DEVICE bool gave_up(const Stress& s) {
    const u32 me = s.heap.rank;
    return s.heap.word(me, ABORT_WORD).load<Order::Relaxed>() != 0 &&
           port::read<i32>(s.heap.control + 4) != 0;
}

/// Compares the output of the call with the expected values. After a fault the comparison is skipped: the
/// host reports the fault, and a missing wait must show by wrong elements in a call without a fault.
IRIS_KERNEL iris_stress_compare(IRIS_ARGS Stress s) {
    if (gave_up(s)) return;
    const u32 size = element_bytes(s.dtype);
    i32 compared = 0;
    for_each(s.room, s.cols, [&](u32 row, u32 col) {
        const float seen = load_element(s.c + (u64(row) * s.cols + col) * size, s.dtype);
        const float wanted = row < s.rows ? expected(s, row, col) : not_a_number();
        const bool right = row < s.rows ? seen == wanted : seen != seen;
        if (!right) report(s, row, col, seen, wanted);
        ++compared;
    });
    if (s.gets == Rows::None && port::workgroup() == 0) {
        for (u32 rank = port::thread(); rank < s.heap.size; rank += port::threads()) {
            const i32 seen = s.heap.at(s.words, s.heap.rank).get(rank * LINE_WORDS);
            const i32 call = static_cast<i32>(s.call);
            if (seen != call) report(s, rank, 0, static_cast<float>(seen), static_cast<float>(call));
            ++compared;
        }
    }
    s.heap.at(s.report, s.heap.rank).word(7).add<Order::Relaxed>(compared);
}

/// Test of a versioned lock, in a ring of ranks. One workgroup sends a message to the next rank, receives a
/// message from the previous rank, and tells the previous rank that it may send again.
IRIS_KERNEL iris_stress_ring(IRIS_ARGS Stress s) {
    const u32 me = s.heap.rank, size = s.heap.size, len = static_cast<u32>(s.cargo.len);
    const u32 next = (me + 1) % size, before = (me + size - 1) % size;
    const Channel channel{~0u, me, size, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    const Words m{s.heap, channel};
    const Call version(static_cast<i32>(s.call));
    // Signals of the ring: `filled` says that the message for a rank has arrived, `taken` that the
    // next rank has read a rank's message.
    const auto filled = [&](u32 rank) { return s.heap.at(s.words, rank).word(0); };
    const auto taken = [&](u32 rank) { return s.heap.at(s.words, rank).word(LINE_WORDS); };
    const auto wait = [&](SymWord word, Call wanted, u32 from) {
        const bool thread_0 = port::thread() == 0;
        return port::vote(!thread_0 || epoch::wait(m, word, wanted, from), Site::Waited);
    };
    const auto publish = [&](SymWord word) {
        port::barrier(Site::Signal);
        if (port::thread() == 0) epoch::publish(m, word, version);
    };
    straggle(s);
    if (!wait(taken(me), version.previous(), next)) return;
    for (u32 i = port::thread(); i < len; i += port::threads()) {
        s.heap.at(s.cargo, next).put(i, static_cast<i32>(s.call * 31 + me * 7 + i));
    }
    publish(filled(next));
    if (!wait(filled(me), version, before)) return;
    i32 compared = 0;
    for (u32 i = port::thread(); i < len; i += port::threads()) {
        const i32 seen = s.heap.at(s.cargo, me).get(i);
        const i32 wanted = static_cast<i32>(s.call * 31 + before * 7 + i);
        if (seen != wanted) report(s, 0, i, static_cast<float>(seen), static_cast<float>(wanted));
        ++compared;
    }
    s.heap.at(s.report, me).word(7).add<Order::Relaxed>(compared);
    publish(taken(before));
}
