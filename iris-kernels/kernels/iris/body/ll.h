// The body of the collectives of small messages, in words that carry their data: an item is eight bytes
// of a message whose rows are taken one behind the other.
#ifndef IRIS_BODY_LL_H
#define IRIS_BODY_LL_H

#include "iris/body/norm.h"
#include "iris/body/partial.h"

namespace iris {

/// Where the elements of a part of a message lie: `count` of them, row by row, from the first of
/// `view` on.
struct Elements {
    View view;
    u64 count;
    u32 cols;

    IRIS_DEVICE u64 at(u64 element) const {
        return view.at(static_cast<u32>(element / cols), static_cast<u32>(element % cols));
    }
};

/// The elements from `first` on that are an item, two to the power of `shift` in type `dtype`; those
/// behind the last are 0.
IRIS_COLD u64 load_items_pieces(Elements from, u64 first, u32 shift, u32 dtype) {
    u64 item = 0;
    IRIS_NO_UNROLL
    for (u32 i = 0; i < 1u << shift && first + i < from.count; ++i) {
        const u64 at = from.at(first + i);
        u32 bits;
        if (dtype != from.view.dtype) {
            const float value = load_element(at, from.view.dtype);
            bits = dtype == F32 ? __builtin_bit_cast(u32, value) : narrow(dtype, value);
        } else {
            bits = dtype == F32 ? port::read<u32>(at) : port::read<u16>(at);
        }
        item |= u64(bits) << i * (64 >> shift);
    }
    return item;
}

/// Put the elements of an item, which have the type of the matrix, to those from `first` on.
IRIS_COLD void store_items_pieces(Elements to, u64 first, u32 shift, u64 item) {
    IRIS_NO_UNROLL
    for (u32 i = 0; i < 1u << shift && first + i < to.count; ++i) {
        const u64 at = to.at(first + i), bits = item >> i * (64 >> shift);
        if (to.view.dtype == F32) port::write(at, static_cast<u32>(bits));
        else port::write(at, static_cast<u16>(bits));
    }
}

/// The values of an item.
struct ItemValues {
    float v[4];
};

/// Put the values of an item, rounded, to the elements from `first` on.
IRIS_COLD void store_value_pieces(Elements to, u64 first, u32 shift, ItemValues values) {
    IRIS_UNROLL
    for (u32 i = 0; i < 4; ++i) {
        if (i >= 1u << shift || first + i >= to.count) break;
        store_element(to.at(first + i), to.view.dtype, values.v[i]);
    }
}

/// Those of the elements from `first` on, in rows of `cols`, with what is done to sums.
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

/// The rows of a matrix from one on, as items.
class ItemsOf {
  public:
    IRIS_DEVICE ItemsOf(const View& view, u32 rows, u32 cols, u32 shift)
        : elements{view, u64(rows) * cols, cols}, shift(shift),
          // Eight bytes are eight bytes, where rows have no gaps.
          whole(!view.transposed && (view.ld == cols || rows <= 1) && (view.address & 7) == 0 &&
                        (element_bytes(view.dtype) << shift) == 8
                    ? static_cast<u32>(elements.count >> shift)
                    : 0) {}

    /// The elements of an item in type `dtype`; those behind the last are 0.
    IRIS_DEVICE void load(u32 item, u32 dtype, u32 (&data)[2]) const {
        const u64 bits = item < whole && dtype == elements.view.dtype
                             ? port::read<u64>(elements.view.address + u64(item) * 8)
                             : load_items_pieces(elements, u64(item) << shift, shift, dtype);
        data[0] = static_cast<u32>(bits);
        data[1] = static_cast<u32>(bits >> 32);
    }

    /// Put an item there, of elements that have the type of the matrix.
    IRIS_DEVICE void store(u32 item, const u32 (&data)[2]) const {
        const u64 bits = u64(data[1]) << 32 | data[0];
        if (item < whole) port::write(elements.view.address + u64(item) * 8, bits);
        else store_items_pieces(elements, u64(item) << shift, shift, bits);
    }

    /// Put the values of an item there, rounded.
    IRIS_DEVICE void store(u32 item, const ItemValues& values) const {
        const View& view = elements.view;
        if (item < whole) {
            u32 data[2];
            pack(view.dtype, values, data);
            port::write(view.address + u64(item) * 8, u64(data[1]) << 32 | data[0]);
        } else {
            store_value_pieces(elements, u64(item) << shift, shift, values);
        }
    }

    /// The final values of an item of a result: bias, if it has an address, then GELU, once.
    IRIS_DEVICE ItemValues finish(u32 item, View bias, u32 epilogue, const ItemValues& values) const {
        return finish_item(bias, epilogue, elements.cols, u64(item) << shift, values);
    }

    /// The values of an item, and what an item of some values is.
    IRIS_DEVICE static ItemValues unpack(u32 dtype, const u32 (&data)[2]) {
        ItemValues values;
        if (dtype == F16) {
            IRIS_UNROLL
            for (u32 i = 0; i < 4; ++i) values.v[i] = widen(F16, half(data, i));
        } else {
            IRIS_UNROLL
            for (u32 i = 0; i < 4; ++i) values.v[i] = widen(BF16, half(data, i));
        }
        // Selected, not branched to: from three branches that end in one value LLVM 22 makes code, for
        // gfx942, that reads halves of a word from a register in which it has just put one of them.
        IRIS_UNROLL
        for (u32 i = 0; i < 4; ++i) {
            const float word = i < 2 ? __builtin_bit_cast(float, data[i]) : 0.0f;
            values.v[i] = dtype == F32 ? word : values.v[i];
        }
        return values;
    }
    IRIS_DEVICE static void pack(u32 dtype, const ItemValues& values, u32 (&data)[2]) {
        IRIS_UNROLL
        for (u32 i = 0; i < 2; ++i) {
            const float low = values.v[2 * i], high = values.v[2 * i + 1];
            if (dtype == F32) data[i] = __builtin_bit_cast(u32, values.v[i]);
            else if (dtype == F16) data[i] = narrow(F16, low) | static_cast<u32>(narrow(F16, high)) << 16;
            else data[i] = narrow(BF16, low) | static_cast<u32>(narrow(BF16, high)) << 16;
        }
    }

  private:
    IRIS_DEVICE static u16 half(const u32 (&data)[2], u32 i) {
        return static_cast<u16>(data[i / 2] >> i % 2 * 16);
    }

    const Elements elements;
    const u32 shift;
    /// Items that are read and written as eight bytes, from the first on.
    const u32 whole;
};

/// One thread's items of a call.
template <Collective C, u32 N> class ExchangeBody {
    static constexpr bool REDUCES = C == Collective::AllReduce || C == Collective::ReduceScatter;

  public:
    IRIS_DEVICE explicit ExchangeBody(const OpArgs& args)
        : dtype(REDUCES ? args.wire : args.c.dtype),
          items(C, args.channel.size, args.m, args.n, dtype == F32 ? 2 : 4, args.root),
          args(args), sum{}, mine(of_mine(args.channel.rank)), result(of_result(args.channel.rank)),
          own{}, held{}, own_is_added(false) {}

    /// Type of what travels.
    const u32 dtype;
    const Items items;

    IRIS_DEVICE void load(u32 first, u32 item) {
        // Where all peers get the same, it is read once; else all are under way together.
        if constexpr (SAME_FOR_ALL) {
            if (N == 1 || first == 1) mine.load(item, dtype, held[0]);
        } else {
            IRIS_UNROLL
            for (u32 i = 0; i < N; ++i) {
                if (first + i >= args.channel.size) break;
                const u32 peer = args.channel.peer(first + i);
                if (item < items.sent(me(), peer)) of_mine(peer).load(item, dtype, held[i]);
            }
        }
    }

    IRIS_DEVICE void give(u32 i, u32, u32, u32 (&data)[2]) {
        data[0] = held[SAME_FOR_ALL ? 0 : i][0];
        data[1] = held[SAME_FOR_ALL ? 0 : i][1];
        if (args.counters != 0) {
            Trace(0, 0, args.counters, 0).add(Counter::Pushed, PAIR_BYTES);
        }
    }

    IRIS_DEVICE void begin(u32 item) {
        if constexpr (REDUCES) {
            // It is under way while the others' are awaited.
            mine.load(item, dtype, own);
            // Nothing but a negative zero leaves every number as it is.
            IRIS_UNROLL
            for (u32 i = 0; i < 4; ++i) sum.v[i] = -0.0f;
            own_is_added = false;
            if constexpr (C == Collective::ReduceScatter) add_own();
        } else {
            if (item >= items.sent(me(), me()) || args.a.address == args.c.address) return;
            u32 data[2];
            mine.load(item, dtype, data);
            result.store(item, data);
        }
    }

    IRIS_DEVICE void take(u32 source, u32 item, const u32 (&data)[2]) {
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
            sum = result.finish(item, View::of(args.bias), args.epilogue, sum);
        }
    }
    IRIS_DEVICE void store_sum(u32 item) { result.store(item, sum); }
    IRIS_DEVICE void add(const u32 (&data)[2]) {
        const ItemValues values = ItemsOf::unpack(dtype, data);
        IRIS_UNROLL
        for (u32 i = 0; i < 4; ++i) sum.v[i] += values.v[i];
    }

    const OpArgs& args;
    ItemValues sum;

  private:
    static constexpr u64 PAIR_BYTES = 16;
    static constexpr bool SAME_FOR_ALL =
        C == Collective::AllReduce || C == Collective::AllGather || C == Collective::Broadcast;

    IRIS_DEVICE u32 me() const { return args.channel.rank; }
    /// What this rank sends to `to`.
    IRIS_DEVICE ItemsOf of_mine(u32 to) const {
        return ItemsOf(View::of(args.a).from(items.source_row(to), 0), items.rows_sent(me(), to),
                       items.cols, items.shift);
    }
    /// Where what `source` sends belongs.
    IRIS_DEVICE ItemsOf of_result(u32 source) const {
        return ItemsOf(View::of(args.c).from(items.target_row(source, me()), 0),
                       items.rows_sent(source, me()), items.cols, items.shift);
    }
    IRIS_DEVICE void add_own() {
        add(own);
        own_is_added = true;
    }

    /// What this rank has itself, and where it belongs; where all get the same, what it sends.
    const ItemsOf mine, result;
    u32 own[2];
    /// What goes to some peers.
    u32 held[SAME_FOR_ALL ? 1 : N][2];
    bool own_is_added;
};

/// Add the residual of another type than what travels to the values of an item.
IRIS_COLD ItemValues add_residual_pieces(View residual, u32 cols, u64 first, u32 shift,
                                         ItemValues values) {
    IRIS_UNROLL
    for (u32 i = 0; i < 4; ++i) {
        if (i >= 1u << shift) break;
        const u64 at = residual.at(static_cast<u32>((first + i) / cols), static_cast<u32>((first + i) % cols));
        values.v[i] += load_element(at, residual.dtype);
    }
    return values;
}

/// One thread's items of a call in which a residual is added. Rows are whole items.
template <u32 N> class ResidualBody : public ExchangeBody<Collective::AllReduce, N> {
    using Base = ExchangeBody<Collective::AllReduce, N>;

  public:
    IRIS_DEVICE explicit ResidualBody(const OpArgs& args)
        : Base(args), residual(View::of(args.residual), args.m, args.n, this->items.shift), held{} {}

    IRIS_DEVICE void begin(u32 item) {
        Base::begin(item);
        // It is under way while the others' are awaited.
        if (travels_alike()) residual.load(item, this->dtype, held);
    }
    IRIS_DEVICE void end(u32 item) {
        this->finish_sum(item);
        const u32 shift = this->items.shift;
        if (travels_alike()) {
            this->add(held);
        } else if (this->args.residual.address != 0) {
            this->sum = add_residual_pieces(View::of(this->args.residual), this->args.n,
                                            u64(item) << shift, shift, this->sum);
        }
        this->store_sum(item);
    }

  private:
    /// Whether there is one, of the type that travels.
    IRIS_DEVICE bool travels_alike() const {
        return this->args.residual.address != 0 && this->args.residual.dtype == this->dtype;
    }

    const ItemsOf residual;
    u32 held[2];
};

template <u32 N> IRIS_DEVICE bool run_exchange_norm_of(const OpArgs& args) {
    ResidualBody<N> body(args);
    return flow::exchange_rows<N>(launch_of(args), body.items, args.n >> body.items.shift, body);
}

/// A sum with a residual, whose rows are normalised by the workgroup that has taken them, when the call is
/// over.
IRIS_DEVICE void run_exchange_norm(const OpArgs& given) {
    const OpArgs& args = port::in_place(given);
    const bool done = args.channel.size == 2 ? run_exchange_norm_of<1>(args)
                                             : run_exchange_norm_of<ll::SOURCES>(args);
    if (!done) return;
    const Launch launch = launch_of(args);
    for (u32 row = launch.count - 1 - launch.index; row < args.m; row += launch.count) {
        norm_rows(args, row, 1);
    }
}

template <Collective C, u32 N> IRIS_DEVICE void run_exchange_of(const OpArgs& args) {
    ExchangeBody<C, N> body(args);
    flow::exchange<N>(launch_of(args), body.items, body);
}

template <Collective C> IRIS_DEVICE void run_exchange(const OpArgs& given) {
    // The body keeps a reference to them.
    const OpArgs& args = port::in_place(given);
    if (args.channel.size == 2) run_exchange_of<C, 1>(args);
    else run_exchange_of<C, ll::SOURCES>(args);
}

} // namespace iris

#endif
