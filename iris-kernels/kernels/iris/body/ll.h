// Bodies of collectives of small messages by the LL protocol (data and flag in one word). An item
// is 8 bytes (ll::Ll64) or 48 bytes (ll::Ll128) of a message whose rows are concatenated.
//
// This file is long because items are processed in several ways: one by one, several per thread at
// once, and as rows that are normalised item by item or in vectors that stay in registers.
#ifndef IRIS_BODY_LL_H
#define IRIS_BODY_LL_H

#include "iris/body/combine.h"
#include "iris/body/norm.h"
#include "iris/body/sums.h"

namespace iris {

/// Part of a message as a sequence of elements: `count` elements in row-major order, beginning with
/// the first element of `view`, in rows of `cols` elements.
struct Elements {
    View view;
    u64 count;
    u32 cols;

    IRIS_DEVICE u64 at(u64 element) const {
        return view.at(static_cast<u32>(element / cols), static_cast<u32>(element % cols));
    }
};

/// Loads an item element by element: the 2^`shift` elements from element `first` on, converted to
/// type `dtype`. Elements after the end of the message are 0.
IRIS_COLD u64 load_items_pieces(Elements from, u64 first, u32 shift, u32 dtype) {
    u64 item = 0;
    IRIS_NO_UNROLL
    for (u32 i = 0; i < 1u << shift && first + i < from.count; ++i) {
        const u64 at = from.at(first + i);
        const u32 bits = dtype != from.view.dtype
                             ? bits_of(dtype, load_element(at, from.view.dtype))
                             : load_bits(at, dtype);
        item |= u64(bits) << i * (64 >> shift);
    }
    return item;
}

/// Stores the elements of an item one by one, from element `first` on. The elements already have
/// the matrix's type.
IRIS_COLD void store_items_pieces(Elements to, u64 first, u32 shift, u64 item) {
    IRIS_NO_UNROLL
    for (u32 i = 0; i < 1u << shift && first + i < to.count; ++i) {
        const u64 at = to.at(first + i), bits = item >> i * (64 >> shift);
        store_bits(at, to.view.dtype, static_cast<u32>(bits));
    }
}

/// Stores the values of an item one by one, rounded, from element `first` on.
IRIS_COLD void store_value_pieces(Elements to, u64 first, u32 shift, ItemValues values) {
    IRIS_UNROLL
    for (u32 i = 0; i < 4; ++i) {
        if (i >= 1u << shift || first + i >= to.count) break;
        store_element(to.at(first + i), to.view.dtype, values.v[i]);
    }
}

/// Adds the bias to the values of an item and applies GELU. `first` is the position of
/// the item's first element in the result, which is row-major with `cols` columns.
IRIS_COLD ItemValues finish_item(View bias, u32 epilogue, u32 cols, u64 first, ItemValues values) {
    IRIS_UNROLL
    for (u32 i = 0; i < 4; ++i) {
        if (bias.address != 0) {
            const u32 col = static_cast<u32>((first + i) % cols);
            values.v[i] += load_element(bias.at(0, col), bias.dtype);
        }
        if (epilogue & EPILOGUE_GELU) values.v[i] = gelu(values.v[i]);
    }
    return values;
}

/// Rows of a matrix as a sequence of items of 8 bytes; an item is the data of one pair of LL words.
class ItemsOf {
  public:
    static constexpr bool COMBINES = false;

    IRIS_DEVICE ItemsOf(const View& view, u32 rows, u32 cols, u32 shift)
        : elements{view, u64(rows) * cols, cols}, shift(shift),
          // Number of items that can be accessed as one 8-byte word: all items if the rows are
          // contiguous, aligned and of the transfer type, else none.
          whole(!view.transposed && (view.ld == cols || rows <= 1) && (view.address & 7) == 0 &&
                        (element_bytes(view.dtype) << shift) == 8
                    ? static_cast<u32>(elements.count >> shift)
                    : 0) {}

    /// Loads an item, converted to type `dtype`. Elements after the end of the message are 0.
    IRIS_DEVICE void load(u32 item, u32 dtype, u32 (&data)[2]) const {
        const u64 bits = item < whole && dtype == elements.view.dtype
                             ? port::read<u64>(elements.view.address + u64(item) * 8)
                             : load_items_pieces(elements, u64(item) << shift, shift, dtype);
        data[0] = static_cast<u32>(bits);
        data[1] = static_cast<u32>(bits >> 32);
    }

    /// Stores an item whose elements already have the matrix's type.
    IRIS_DEVICE void store(u32 item, const u32 (&data)[2]) const {
        const u64 bits = u64(data[1]) << 32 | data[0];
        if (item < whole) port::write(elements.view.address + u64(item) * 8, bits);
        else store_items_pieces(elements, u64(item) << shift, shift, bits);
    }

    /// Stores the values of an item, rounded to the matrix's type.
    IRIS_DEVICE void store(u32 item, const ItemValues& values) const {
        const View& view = elements.view;
        if (item < whole) {
            u32 data[2];
            pack_item(view.dtype, values, data);
            port::write(view.address + u64(item) * 8, u64(data[1]) << 32 | data[0]);
        } else {
            store_value_pieces(elements, u64(item) << shift, shift, values);
        }
    }

    /// Applies bias (if its address is not 0) and then GELU to the values of an item; called once
    /// per item.
    IRIS_DEVICE ItemValues finish(u32 item, View bias, u32 epilogue, const ItemValues& values) const {
        return finish_item(bias, epilogue, elements.cols, u64(item) << shift, values);
    }

  protected:
    const Elements elements;
    const u32 shift;
    /// Number of items, from item 0 on, that can be accessed as one 8-byte word.
    const u32 whole;
};

/// Rows of a matrix as a sequence of items of the LL protocol. Here an item has 8 bytes, sent as a pair of LL
/// words; the specialisation below is for packs of 48 bytes.
template <class LlUnit> class UnitsOf : public ItemsOf {
  public:
    using ItemsOf::ItemsOf;

    IRIS_DEVICE static void unpack(u32 dtype, const u32 (&data)[2], ItemValues (&values)[1]) {
        values[0] = unpack_item(dtype, data);
    }
    IRIS_DEVICE static void pack(u32 dtype, const ItemValues (&values)[1], u32 (&data)[2]) {
        pack_item(dtype, values[0], data);
    }
    using ItemsOf::store;
    IRIS_DEVICE void store(u32 item, const ItemValues (&values)[1]) const {
        ItemsOf::store(item, values[0]);
    }
    IRIS_DEVICE void finish(u32 item, View bias, u32 epilogue, ItemValues (&values)[1]) const {
        values[0] = ItemsOf::finish(item, bias, epilogue, values[0]);
    }
};

/// Rows of a matrix as a sequence of packs. A pack is three vectors of 16 bytes, each of two items of
/// 8 bytes; the last pack may end after the message.
template <> class UnitsOf<ll::Ll128> : public ItemsOf {
  public:
    IRIS_DEVICE UnitsOf(const View& view, u32 rows, u32 cols, u32 shift)
        : ItemsOf(view, rows, cols, shift), vectors((view.address & 15) == 0 ? whole / 2 : 0) {}

    IRIS_DEVICE void load(u32 pack, u32 dtype, u32 (&data)[12]) const {
        IRIS_UNROLL
        for (u32 i = 0; i < 3; ++i) {
            const u32 vector = ll::Ll128::vector(pack, i);
            if (vector < vectors && dtype == elements.view.dtype) {
                const Vec16 read = port::read<Vec16>(elements.view.address + u64(vector) * 16);
                IRIS_UNROLL
                for (u32 word = 0; word < 4; ++word) data[4 * i + word] = read.word[word];
                continue;
            }
            IRIS_UNROLL
            for (u32 half = 0; half < 2; ++half) {
                u32 item[2];
                ItemsOf::load(2 * vector + half, dtype, item);
                data[4 * i + 2 * half] = item[0];
                data[4 * i + 2 * half + 1] = item[1];
            }
        }
    }
    IRIS_DEVICE void store(u32 pack, const u32 (&data)[12]) const {
        store(pack, data, [&](u32 item, u32 part) IRIS_INLINE {
            ItemsOf::store(item, item_of(data, part).words);
        });
    }
    IRIS_DEVICE void store(u32 pack, const ItemValues (&values)[6]) const {
        u32 data[12];
        UnitsOf::pack(elements.view.dtype, values, data);
        store(pack, data, [&](u32 item, u32 part) IRIS_INLINE { ItemsOf::store(item, values[part]); });
    }
    IRIS_DEVICE void finish(u32 pack, View bias, u32 epilogue, ItemValues (&values)[6]) const {
        IRIS_UNROLL
        for (u32 part = 0; part < 6; ++part) {
            const u32 item = 2 * ll::Ll128::vector(pack, part / 2) + part % 2;
            values[part] = ItemsOf::finish(item, bias, epilogue, values[part]);
        }
    }

    IRIS_DEVICE static void unpack(u32 dtype, const u32 (&data)[12], ItemValues (&values)[6]) {
        IRIS_UNROLL
        for (u32 part = 0; part < 6; ++part) {
            values[part] = unpack_item(dtype, item_of(data, part).words);
        }
    }
    IRIS_DEVICE static void pack(u32 dtype, const ItemValues (&values)[6], u32 (&data)[12]) {
        IRIS_UNROLL
        for (u32 part = 0; part < 6; ++part) {
            u32 item[2];
            pack_item(dtype, values[part], item);
            data[2 * part] = item[0];
            data[2 * part + 1] = item[1];
        }
    }

  private:
    struct Words2 {
        u32 words[2];
    };
    /// Both words of item `part` (0 to 5) of a pack.
    IRIS_DEVICE static Words2 item_of(const u32 (&data)[12], u32 part) {
        return Words2{{data[2 * part], data[2 * part + 1]}};
    }
    /// Stores a pack vector by vector. A vector that cannot be stored as a whole is stored by two
    /// calls of `store_item(item, part)`: part `part` (0 to 5) of the pack is item `item` of the
    /// message.
    template <class Store>
    IRIS_DEVICE void store(u32 pack, const u32 (&data)[12], Store store_item) const {
        IRIS_UNROLL
        for (u32 i = 0; i < 3; ++i) {
            const u32 vector = ll::Ll128::vector(pack, i);
            if (vector < vectors) {
                const Vec16 from{{data[4 * i], data[4 * i + 1], data[4 * i + 2], data[4 * i + 3]}};
                port::write(elements.view.address + u64(vector) * 16, from);
                continue;
            }
            store_item(2 * vector, 2 * i);
            store_item(2 * vector + 1, 2 * i + 1);
        }
    }

    /// Number of vectors, from vector 0 on, that can be accessed as one word of 16 bytes.
    const u32 vectors;
};

/// Body of a collective by the LL protocol: loads, adds and stores the items of one thread. `Source` is the
/// class of this rank's data as items.
template <Collective C, u32 N, class LlUnit = ll::Ll64, class Source = UnitsOf<LlUnit>> class ExchangeBody {
  protected:
    static constexpr bool REDUCES = C == Collective::AllReduce || C == Collective::ReduceScatter;
    /// Number of 32-bit words of an item, number of parts of 8 bytes, and number of peers whose items
    /// are loaded together.
    static constexpr u32 WORDS = LlUnit::WORDS, PARTS = WORDS / 2, LOADED = LlUnit::loaded(N);
    using Data = u32[WORDS];
    using Units = UnitsOf<LlUnit>;

  public:
    IRIS_DEVICE explicit ExchangeBody(const OpArgs& args)
        : dtype(REDUCES ? args.wire : args.c.dtype),
          items(C, args.channel.size, args.m, args.n, item_elements(dtype), args.root),
          args(args), sum{}, mine(of_mine(args.channel.rank)), result(of_result(args.channel.rank)),
          own{}, held{}, own_is_added(false) {}

    /// Code of the element type in which data is sent between ranks.
    const u32 dtype;
    const Items items;

    /// Number of items that `from` sends to `to`.
    IRIS_DEVICE u32 sent(u32 from, u32 to) const { return LlUnit::count(items.sent(from, to)); }

    IRIS_DEVICE void load(u32 first, u32 item) {
        // Data that is equal for all peers is loaded once. Otherwise the loads for all N peers are
        // issued together, so that their latencies overlap.
        if constexpr (SAME_FOR_ALL) {
            if (N == 1 || first == 1) {
                mine.load(item, dtype, held[0]);
                held_item = item;
            }
        } else {
            IRIS_UNROLL
            for (u32 i = 0; i < LOADED; ++i) {
                if (first + i >= args.channel.size) break;
                const u32 peer = args.channel.peer(first + i);
                if (item < sent(me(), peer)) of_mine(peer).load(item, dtype, held[i]);
            }
        }
    }

    IRIS_DEVICE void give(u32 i, u32, u32, Data& data) {
        copy_words(held[SAME_FOR_ALL ? 0 : i], data);
        count(1);
    }

    IRIS_DEVICE void begin(u32 item) {
        if constexpr (REDUCES) {
            // This rank's own item is loaded while this thread waits for the peers' items. A sum of parts is not
            // made again if it is the item that this thread pushed last.
            if (Source::COMBINES && SAME_FOR_ALL && item == held_item) copy_words(held[0], own);
            else mine.load(item, dtype, own);
            // The sum starts from -0.0, the neutral element: starting from 0.0 would turn a sum of
            // -0.0 into 0.0.
            IRIS_UNROLL
            for (u32 i = 0; i < 4 * PARTS; ++i) sum[i / 4].v[i % 4] = -0.0f;
            own_is_added = false;
        } else {
            if (item >= sent(me(), me()) || args.a.address == args.c.address) return;
            Data data;
            mine.load(item, dtype, data);
            result.store(item, data);
        }
    }

    IRIS_DEVICE void take(u32 source, u32 item, const Data& data) {
        if constexpr (REDUCES) {
            if (!own_is_added && source > me()) add_own();
            add(data);
        } else {
            of_result(source).store(item, data);
        }
    }

    IRIS_DEVICE void end(u32 item) {
        if constexpr (REDUCES) {
            finish_sum(item);
            store_sum(item);
        }
    }

  protected:
    IRIS_DEVICE void finish_sum(u32 item) {
        if (!own_is_added) add_own();
        if (IRIS_RARE(args.bias.address != 0 || (args.epilogue & EPILOGUE_GELU) != 0)) {
            result.finish(item, View::of(args.bias), args.epilogue, sum);
        }
    }
    IRIS_DEVICE void store_sum(u32 item) { result.store(item, sum); }
    IRIS_DEVICE void add(const Data& data) {
        ItemValues values[PARTS];
        Units::unpack(dtype, data, values);
        IRIS_UNROLL
        for (u32 i = 0; i < 4 * PARTS; ++i) sum[i / 4].v[i % 4] += values[i / 4].v[i % 4];
    }
    IRIS_DEVICE static void copy_words(const Data& from, Data& to) {
        IRIS_UNROLL
        for (u32 i = 0; i < WORDS; ++i) to[i] = from[i];
    }

    static constexpr bool SAME_FOR_ALL =
        C == Collective::AllReduce || C == Collective::AllGather || C == Collective::Broadcast;

    IRIS_DEVICE u32 me() const { return args.channel.rank; }
    /// Counts the bytes of `pushed` items.
    IRIS_DEVICE void count(u32 pushed) const {
        if (args.counters == 0) return;
        Trace(0, 0, args.counters, 0).add(Counter::Pushed, u64(pushed) * LlUnit::BYTES);
    }
    /// Data that this rank sends to rank `to`, as items.
    IRIS_DEVICE Source of_mine(u32 to) const {
        if constexpr (Source::COMBINES) {
            return Source(RowParts::of(args).from(items.source_row(to)), items.rows_sent(me(), to), items.shift);
        } else {
            return Source(View::of(args.a).from(items.source_row(to), 0), items.rows_sent(me(), to),
                          items.cols, items.shift);
        }
    }
    /// Destination in C of the data from rank `source`, as items.
    IRIS_DEVICE Units of_result(u32 source) const {
        return Units(View::of(args.c).from(items.target_row(source, me()), 0),
                       items.rows_sent(source, me()), items.cols, items.shift);
    }

    const OpArgs& args;
    ItemValues sum[PARTS];
    /// This rank's own data (`mine`), and its destination in C (`result`). If all peers get the
    /// same data, `mine` is also the data that they get.
    const Source mine;
    const Units result;

  private:
    IRIS_DEVICE void add_own() {
        add(own);
        own_is_added = true;
    }

    Data own;
    /// This rank's items for the next pushes: one per peer, or one for all peers.
    Data held[SAME_FOR_ALL ? 1 : LOADED];
    /// Item in `held`, if all peers get the same data.
    u32 held_item = ~0u;
    bool own_is_added;
};

/// Adds a matrix to the values of an item, element by element. Used if the matrix's type is not the transfer
/// type. An item after the end of the matrix has no elements there.
IRIS_COLD ItemValues add_pieces(Elements from, u64 first, u32 shift, ItemValues values) {
    IRIS_UNROLL
    for (u32 i = 0; i < 4; ++i) {
        if (i >= 1u << shift || first + i >= from.count) break;
        values.v[i] += load_element(from.at(first + i), from.view.dtype);
    }
    return values;
}

/// Body of a reduction whose sums get up to COUNT (1 or 2) further matrices with the rows of C: the residual,
/// then the addend.
template <class Exchange, u32 COUNT> class AddingBody : public Exchange {
    using Base = Exchange;

  public:
    IRIS_DEVICE explicit AddingBody(const OpArgs& args)
        : Base(args), rows(this->items.rows_sent(this->me(), this->me())),
          residual(View::of(args.residual), rows, args.n, this->items.shift),
          addend(View::of(args.addend), rows, args.n, this->items.shift), held{} {}

    IRIS_DEVICE void begin(u32 item) {
        Base::begin(item);
        // The matrices are loaded while this thread waits for the peers' items.
        IRIS_UNROLL
        for (u32 i = 0; i < COUNT; ++i) {
            if (travels_alike(i)) (i == 0 ? residual : addend).load(item, this->dtype, held[i]);
        }
    }
    IRIS_DEVICE void end(u32 item) {
        this->finish_sum(item);
        const u32 shift = this->items.shift;
        IRIS_UNROLL
        for (u32 i = 0; i < COUNT; ++i) {
            if (travels_alike(i)) {
                this->add(held[i]);
            } else if (added(i).address != 0) {
                const Elements from{View::of(added(i)), u64(rows) * this->args.n, this->args.n};
                this->sum[0] = add_pieces(from, u64(item) << shift, shift, this->sum[0]);
            }
        }
        this->store_sum(item);
    }

  private:
    IRIS_DEVICE const Matrix& added(u32 i) const { return i == 0 ? this->args.residual : this->args.addend; }
    /// Whether there is such a matrix, and its type is the transfer type.
    IRIS_DEVICE bool travels_alike(u32 i) const { return added(i).address != 0 && added(i).dtype == this->dtype; }

    /// Number of rows of C.
    const u32 rows;
    const ItemsOf residual, addend;
    u32 held[COUNT][2];
};

/// Body of an all-reduce with RMSNorm, for rows of any layout. A thread processes one item (8
/// bytes) at a time, so rows must consist of whole items. The RMSNorm reads the rows from C again.
template <class Exchange> class NormBody : public Exchange {
    using Base = Exchange;

  public:
    static constexpr u32 PIECE = 1, ITEMS = 1;

    IRIS_DEVICE explicit NormBody(const OpArgs& args) : Base(args), item(0) {}

    template <class Batch> IRIS_DEVICE void load(const Batch& batch) {
        if (batch.count > 0) Base::load(1, batch.first);
    }
    IRIS_DEVICE void give(u32, u32 (&data)[2]) { Base::give(0, 0, 0, data); }
    template <class Batch> IRIS_DEVICE void begin(u32, const Batch& batch) {
        item = batch.first;
        Base::begin(item);
    }
    IRIS_DEVICE void take(u32 source, const u32 (&data)[ITEMS][2]) {
        Base::take(source, item, data[0]);
    }
    IRIS_DEVICE void end() { Base::end(item); }
    IRIS_DEVICE void row(u32 row) { norm_row(this->args, row); }

  private:
    u32 item;
};

/// Shared memory for the RMSNorm of rows that are held in registers: the sum of squares of each
/// vector.
template <u32 HELD> struct VectorSquares {
    float of_vector[HELD * THREADS];
    Squares squares;
};

/// Body of an all-reduce with RMSNorm, for rows of a 16-bit type, with an optional residual of the same type.
/// A thread processes all of its vectors of a row at once and keeps them in registers until they are
/// normalised.
///
/// PAIR: there are two ranks. The data of the only peer is added as soon as it arrives, so
/// registers remain for the residual and the weights. COMBINES: this rank's data are weighted sums of parts,
/// and the sums also get the addend.
template <u32 DTYPE, bool PAIR, bool COMBINES = false> class VectorBody {
  public:
    /// Largest number of vectors of a row that a thread holds (HELD), number of items per vector
    /// (PIECE), and number of items per thread (ITEMS).
    static constexpr u32 HELD = 3, PIECE = WIDTH * element_bytes(DTYPE) / 8, ITEMS = HELD * PIECE;
    static_assert(ITEMS <= ll::AT_ONCE, "one wait takes at most ll::AT_ONCE items");

    /// Whether this body can process the call. All accesses must be full vectors, and a thread must
    /// be able to hold all of its vectors of a row.
    IRIS_DEVICE static bool takes(const OpArgs& args) {
        const Matrix &a = args.a, &c = args.c;
        if (COMBINES && !(RowParts::of(args).is_whole(16) && is_whole(args.addend))) return false;
        const bool residual_too = is_whole(args.residual);
        return Norm::of(args).whole && c.dtype == DTYPE && args.wire == DTYPE && a.dtype == DTYPE &&
               !a.transposed && (a.address & 15) == 0 && (COMBINES || a.ld == args.n || args.m <= 1) &&
               residual_too && args.bias.address == 0 && (args.epilogue & EPILOGUE_GELU) == 0 &&
               args.n <= HELD * WIDTH * (THREADS - port::WAVE);
    }

    IRIS_DEVICE VectorBody(const OpArgs& args, VectorSquares<HELD>& shared)
        : args(args), norm(Norm::of(args)), shared(shared), count(0), summed(false),
          own_is_added(false) {}

    template <class Batch> IRIS_DEVICE void load(const Batch& batch) {
        if constexpr (COMBINES) {
            // Most threads have one item. The loop is short so that it needs few registers.
            IRIS_NO_UNROLL
            for (u32 k = 0; k < batch.count; ++k) {
                given[k] = combined(batch.item(k));
            }
            return;
        }
        const u64 first = args.a.address + u64(batch.first) * 8;
        IRIS_UNROLL
        for (u32 k = 0; k < ITEMS; ++k) {
            if (k >= batch.count) break;
            given[k] = port::read<u64>(first + batch.bytes_behind(k, 8));
        }
    }

    IRIS_DEVICE void give(u32 k, u32 (&data)[2]) {
        data[0] = static_cast<u32>(given[k]);
        data[1] = static_cast<u32>(given[k] >> 32);
        if (args.counters != 0) Trace(0, 0, args.counters, 0).add(Counter::Pushed, 16);
    }

    /// Loads this rank's data, the residual and the weights of a batch. The loads overlap with the
    /// wait for the peers' data.
    template <class Batch> IRIS_DEVICE void begin(u32 row, const Batch& batch) {
        count = batch.count / PIECE;
        at = row;
        first = batch.first * 8 - row * norm.cols * ELEMENT;
        stride = batch.stride * 8;
        summed = own_is_added = false;
        if constexpr (COMBINES) {
            combine_vectors<DTYPE>(RowParts::of(args), row, count, first, stride, own);
        } else {
            each([&](u32 i, u32 bytes) { own[i] = port::read<Vec16>(row_of(args.a) + bytes); });
        }
        if constexpr (PAIR) load_rest();
    }

    IRIS_DEVICE void take(u32 source, const u32 (&data)[ITEMS][2]) {
        if constexpr (!PAIR) {
            if (!summed) clear();
            if (!own_is_added && source > args.channel.rank) add_own();
        }
        each([&](u32 i, u32 bytes) {
            Vec16 vector;
            IRIS_UNROLL
            for (u32 word = 0; word < 4; ++word) vector.word[word] = data[i * PIECE + word / 2][word % 2];
            if constexpr (PAIR) {
                // With two ranks the sum has two summands, whose order does not matter.
                Values values = unpack(vector);
                add_to(values, unpack(own[i]));
                finish(i, bytes, values);
            } else {
                add_to(sum[i], unpack(vector));
            }
        });
    }

    IRIS_DEVICE void end() {
        if constexpr (!PAIR) {
            if (!own_is_added) add_own();
            load_rest();
            each([&](u32 i, u32 bytes) { finish(i, bytes, sum[i]); });
        }
    }

    /// Adds up the squares of a row in the same order as norm_row(), although norm_row() assigns
    /// vectors to threads differently. So equal rows get equal bits.
    IRIS_DEVICE void row(u32) {
        // With an addend there is no room for the weights before the sums are finished.
        if constexpr (COMBINES) load_weights();
        float squares = 0.0f;
        IRIS_UNROLL
        for (u32 i = 0; i < HELD; ++i) {
            const u32 vector = port::thread() + i * THREADS;
            if (vector * WIDTH < norm.cols) squares += shared.of_vector[vector];
        }
        const float scale = scale_of(args, sum_of_threads(shared.squares, squares));
        each([&](u32 i, u32 bytes) {
            const Values values = scaled(unpack(own[i]), scale, unpack(weight[i]));
            port::write(row_of(args.normed) + bytes, pack(values));
        });
        count = 0;
    }

  private:
    /// Whether there is no such matrix to be added, or its rows are vectors of the type.
    IRIS_DEVICE static bool is_whole(const Matrix& added) {
        return added.address == 0 || (added.dtype == DTYPE && !added.transposed &&
                                      ((added.address & 15) | added.ld % WIDTH) == 0);
    }
    /// Item `item` of this rank's message of weighted sums.
    IRIS_DEVICE u64 combined(u32 item) const {
        constexpr u32 PER_ITEM = 8 / ELEMENT;
        const u32 in_row = args.n / PER_ITEM;
        u32 data[2];
        pack_item(DTYPE, combine_item(RowParts::of(args), item / in_row, item % in_row * PER_ITEM), data);
        return u64(data[1]) << 32 | data[0];
    }
    IRIS_DEVICE static Values unpack(const Vec16& vector) { return values_of(Raw{vector, {}}, DTYPE); }
    IRIS_DEVICE static Vec16 pack(const Values& values) { return packed(DTYPE, values); }
    /// Calls `each` for this thread's vectors of the row, with the position of each vector in the
    /// row in bytes.
    template <class Each> IRIS_DEVICE void each(Each each) const {
        IRIS_UNROLL
        for (u32 i = 0; i < HELD; ++i) {
            if (i >= count) break;
            each(i, first + i * stride);
        }
    }
    IRIS_DEVICE u64 row_of(const Matrix& matrix) const {
        return matrix.address + at * matrix.ld * ELEMENT;
    }
    IRIS_DEVICE void clear() {
        // The sum starts from -0.0, the neutral element: starting from 0.0 would turn a sum of -0.0
        // into 0.0.
        IRIS_UNROLL
        for (u32 i = 0; i < HELD * WIDTH; ++i) sum[i / WIDTH].v[i % WIDTH] = -0.0f;
        summed = true;
    }
    IRIS_DEVICE void add_own() {
        each([&](u32 i, u32) { add_to(sum[i], unpack(own[i])); });
        own_is_added = true;
    }
    IRIS_DEVICE void load_rest() {
        if (args.residual.address != 0) {
            each([&](u32 i, u32 bytes) {
                residual[i] = port::read<Vec16>(row_of(args.residual) + bytes);
            });
        }
        if constexpr (!COMBINES) load_weights();
        else if (args.addend.address != 0) {
            each([&](u32 i, u32 bytes) { addend[i] = port::read<Vec16>(row_of(args.addend) + bytes); });
        }
    }
    IRIS_DEVICE void load_weights() {
        each([&](u32 i, u32 bytes) { weight[i] = port::read<Vec16>(args.weight.address + bytes); });
    }
    /// Finishes the sum of a vector: stores it rounded to C, and normalises the rounded values.
    IRIS_DEVICE void finish(u32 i, u32 bytes, Values& values) {
        if (args.residual.address != 0) add_to(values, unpack(residual[i]));
        if (COMBINES && args.addend.address != 0) add_to(values, unpack(addend[i]));
        own[i] = pack(values);
        port::write(row_of(args.c) + bytes, own[i]);
        shared.of_vector[bytes / sizeof(Vec16)] = squares_of(unpack(own[i]));
    }

    static constexpr u32 ELEMENT = element_bytes(DTYPE);

    const OpArgs& args;
    const Norm norm;
    VectorSquares<HELD>& shared;
    /// Number of the row (`at`), number of this thread's vectors in the row (`count`), and, in
    /// bytes, position of the first vector (`first`) and stride between vectors (`stride`).
    u32 at, count, first, stride;
    /// This rank's data as items (8 bytes of the message each), which are pushed to the peers.
    u64 given[ITEMS];
    /// This rank's data, which is later replaced by the row of C; the matrices that are added; and the
    /// RMSNorm weights.
    Vec16 own[HELD], residual[HELD], addend[HELD], weight[HELD];
    Values sum[HELD];
    bool summed, own_is_added;
};

/// Division of a call's message into rows. All workgroups share the pushes, unless A and C are the
/// same memory: then a row could be overwritten before another workgroup has pushed it.
IRIS_DEVICE ll::Rows rows_of(const OpArgs& args, u32 per_item) {
    const u32 len = args.n / per_item;
    return ll::Rows{args.m * len, len, args.a.address != args.c.address};
}

template <u32 DTYPE, bool PAIR, bool COMBINES> IRIS_DEVICE bool run_exchange_norm_vectors(const OpArgs& args) {
    using Body = VectorBody<DTYPE, PAIR, COMBINES>;
    if (!Body::takes(args)) return false;
    IRIS_SHARED(VectorSquares<Body::HELD>, shared);
    Body body(args, shared);
    flow::exchange_rows<PAIR>(launch_of(args), rows_of(args, WIDTH / Body::PIECE), body);
    return true;
}

template <class Exchange> IRIS_DEVICE void run_exchange_norm_items(const OpArgs& args) {
    NormBody<Exchange> body(args);
    flow::exchange_rows<false>(launch_of(args), rows_of(args, 1 << body.items.shift), body);
}

/// Body of a reduction of weighted sums of parts.
template <Collective C, u32 N> using CombiningBody = AddingBody<ExchangeBody<C, N, ll::Ll64, CombinedItems>, 2>;

/// All-reduce with a residual and an RMSNorm by the LL protocol. The workgroup that receives and adds a row
/// also normalises it. `args` are in parameter memory, because the body keeps a reference to them.
template <bool COMBINES> IRIS_DEVICE void run_exchange_norm_of(const OpArgs& args) {
    [[maybe_unused]] const bool pair = args.channel.size == 2;
    if constexpr (!COMBINES || port::HOLDS_VECTORS_OF_PARTS) {
#define IRIS_TWO(name) if (pair && run_exchange_norm_vectors<name, true, COMBINES>(args)) return;
#define IRIS_MORE(name) if (!pair && run_exchange_norm_vectors<name, false, COMBINES>(args)) return;
        IRIS_DTYPES_16_TRIED(IRIS_TWO)
        IRIS_DTYPES_16_TRIED(IRIS_MORE)
#undef IRIS_TWO
#undef IRIS_MORE
    }
    constexpr Collective C = Collective::AllReduce;
    if constexpr (COMBINES) run_exchange_norm_items<CombiningBody<C, 1>>(args);
    else run_exchange_norm_items<AddingBody<ExchangeBody<C, 1>, 1>>(args);
}

IRIS_DEVICE void run_exchange_norm(const OpArgs& given) { run_exchange_norm_of<false>(port::in_place(given)); }

/// Part of an exchange that reads arguments only, so that it runs before the previous launch has ended.
template <u32 N, class LlUnit = ll::Ll64, class Exchange>
IRIS_DEVICE flow::ExchangeArgs<N, LlUnit> exchange_args(const OpArgs& args, const Exchange& exchange) {
    return {Words(args.heap, args.channel), port::workgroup(), port::workgroups(), exchange};
}

template <u32 N, class Body, class LlUnit = ll::Ll64> IRIS_DEVICE void run_exchange_of(const OpArgs& args) {
    Body body(args);
    const flow::ExchangeArgs<N, LlUnit> given = exchange_args<N, LlUnit>(args, body);
    port::take_turn();
    flow::exchange<N, LlUnit>(launch_of(args), given, body, body);
}

template <Collective C> IRIS_DEVICE void run_exchange(const OpArgs& given) {
    // Arguments in parameter memory, because the body keeps a reference to them.
    const OpArgs& args = port::in_place(given);
    if (args.channel.size == 2) run_exchange_of<1, ExchangeBody<C, 1>>(args);
    else if (args.channel.size <= ll::FEW) run_exchange_of<ll::FEW, ExchangeBody<C, ll::FEW>>(args);
    else run_exchange_of<ll::SOURCES, ExchangeBody<C, ll::SOURCES>>(args);
}

/// Finishes the rows of a world of one rank, which has no words of the LL protocol. An RMSNorm is a launch of
/// its own.
template <Collective C> IRIS_DEVICE void combine_alone(const OpArgs& args) {
    port::take_turn();
    CombiningBody<C, 1> body(args);
    const u32 all = body.sent(0, 0), threads = port::threads();
    IRIS_NO_UNROLL
    for (u64 item = u64(port::workgroup()) * threads + port::thread(); item < all;
         item += u64(port::workgroups()) * threads) {
        body.begin(static_cast<u32>(item));
        body.end(static_cast<u32>(item));
    }
}

/// Reduction of weighted sums of parts by the LL protocol.
template <Collective C> IRIS_DEVICE void run_combine(const OpArgs& given) {
    // Arguments in parameter memory, because the body keeps a reference to them.
    const OpArgs& args = port::in_place(given);
    if (args.channel.size == 1) combine_alone<C>(args);
    else if (args.channel.size == 2) run_exchange_of<1, CombiningBody<C, 1>>(args);
    else if (args.channel.size <= ll::FEW) run_exchange_of<ll::FEW, CombiningBody<C, ll::FEW>>(args);
    else run_exchange_of<ll::SOURCES, CombiningBody<C, ll::SOURCES>>(args);
}

/// run_combine() of an all-reduce, followed by an RMSNorm.
IRIS_DEVICE void run_combine_norm(const OpArgs& given) {
    const OpArgs& args = port::in_place(given);
    if (args.channel.size == 1) return combine_alone<Collective::AllReduce>(args);
    port::take_turn();
    run_exchange_norm_of<true>(args);
}

/// Body of an all-reduce in two hops by the LL protocol. C has the type in which data is sent.
template <u32 N, class LlUnit> class SumBody : public ExchangeBody<Collective::AllReduce, N, LlUnit> {
    using Base = ExchangeBody<Collective::AllReduce, N, LlUnit>;
    using Data = typename Base::Data;

  public:
    IRIS_DEVICE explicit SumBody(const OpArgs& args) : Base(args), held{} {}

    IRIS_DEVICE flow::Parts parts() const {
        const u32 count = LlUnit::count(this->items.whole);
        return flow::Parts{this->args.channel.size, count, flow::Parts::ALL};
    }
    IRIS_DEVICE void load(u32 i, u32 item) { this->mine.load(item, this->dtype, held[i]); }
    IRIS_DEVICE void give(u32 i, u32, Data& data) {
        this->copy_words(held[i], data);
        this->count(1);
    }
    IRIS_DEVICE void end(u32 item, Data& data) {
        this->finish_sum(item);
        Base::Units::pack(this->dtype, this->sum, data);
        this->count(this->args.channel.size - 1);
        this->result.store(item, data);
    }
    IRIS_DEVICE void keep(u32, u32 item, const Data& data) { this->result.store(item, data); }

  private:
    Data held[Base::LOADED];
};

/// Body of a broadcast in two hops by the LL protocol.
template <u32 N, class LlUnit> class RelayBody : public ExchangeBody<Collective::Broadcast, N, LlUnit> {
    using Base = ExchangeBody<Collective::Broadcast, N, LlUnit>;
    using Data = typename Base::Data;

  public:
    IRIS_DEVICE explicit RelayBody(const OpArgs& args)
        : Base(args), message(View::of(args.a), args.m, args.n, this->items.shift),
          copy(View::of(args.c), args.m, args.n, this->items.shift), held{}, taken{} {}

    IRIS_DEVICE flow::Parts parts() const {
        const u32 count = LlUnit::count(this->items.whole);
        return flow::Parts{this->args.channel.size, count, this->args.root};
    }
    IRIS_DEVICE void load(u32 i, u32 item) { message.load(item, this->dtype, held[i]); }
    IRIS_DEVICE void give(u32 i, u32 item, Data& data) {
        this->copy_words(held[i], data);
        // The root also stores its message in C, unless the call is in place.
        if (this->args.a.address != this->args.c.address) copy.store(item, data);
        this->count(1);
    }
    IRIS_DEVICE void begin(u32) {}
    IRIS_DEVICE void take(u32, u32 item, const Data& data) {
        this->copy_words(data, taken);
        copy.store(item, data);
    }
    IRIS_DEVICE void end(u32 item, Data& data) {
        const bool root = this->me() == this->args.root;
        this->count(this->args.channel.size - 1 - (root ? 0 : 1));
        if (root) {
            message.load(item, this->dtype, data);
            if (this->args.a.address != this->args.c.address) copy.store(item, data);
        } else {
            this->copy_words(taken, data);
        }
    }
    IRIS_DEVICE void keep(u32, u32 item, const Data& data) { copy.store(item, data); }

  private:
    /// The root's message (not used on other ranks), and this rank's copy of it.
    const typename Base::Units message, copy;
    Data held[Base::LOADED], taken;
};

template <u32 N, class LlUnit, class Body> IRIS_DEVICE void run_two_shot_ll_of(const OpArgs& args) {
    Body body(args);
    const flow::Parts parts = body.parts();
    const flow::ExchangeArgs<N, LlUnit> given = exchange_args<N, LlUnit>(args, parts);
    port::take_turn();
    flow::two_shot_ll<N, LlUnit>(launch_of(args), given, parts, body);
}

template <template <u32, class> class Body> IRIS_DEVICE void run_two_shot_ll(const OpArgs& given) {
    using ll::FEW, ll::SOURCES, ll::Ll64;
    // Arguments in parameter memory, because the body keeps a reference to them.
    const OpArgs& args = port::in_place(given);
    if (args.channel.size <= FEW) run_two_shot_ll_of<FEW, Ll64, Body<FEW, Ll64>>(args);
    else run_two_shot_ll_of<SOURCES, Ll64, Body<SOURCES, Ll64>>(args);
}

/// Exchange of larger messages, in packs (units of 48 bytes). The host selects this kernel, on all
/// ranks alike. It is separate from the others because its larger number of registers would slow
/// down small messages.
template <Collective C> IRIS_DEVICE void run_exchange_packs(const OpArgs& given) {
    const OpArgs& args = port::in_place(given);
    if (args.channel.size == 2) run_exchange_of<1, ExchangeBody<C, 1, ll::Ll128>, ll::Ll128>(args);
    else run_exchange_of<ll::SOURCES, ExchangeBody<C, ll::SOURCES, ll::Ll128>, ll::Ll128>(args);
}

/// Exchange of larger messages in two hops, in packs.
template <template <u32, class> class Body> IRIS_DEVICE void run_two_shot_packs(const OpArgs& given) {
    using ll::SOURCES, ll::Ll128;
    run_two_shot_ll_of<SOURCES, Ll128, Body<SOURCES, Ll128>>(port::in_place(given));
}

} // namespace iris

#endif
