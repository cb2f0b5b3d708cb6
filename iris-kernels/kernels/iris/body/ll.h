// The body of the collectives of small messages, in words that carry their data: an item is eight bytes
// of a message whose rows are taken one behind the other.
#ifndef IRIS_BODY_LL_H
#define IRIS_BODY_LL_H

#include "iris/body/partial.h"

namespace iris {

/// The rows of a matrix from one on, as items.
class ItemsOf {
  public:
    IRIS_DEVICE ItemsOf(const View& view, u32 rows, u32 cols, u32 shift)
        : view(view), count(u64(rows) * cols), cols(cols), shift(shift),
          // Eight bytes are eight bytes, where rows have no gaps.
          whole(!view.transposed && (view.ld == cols || rows <= 1) && (view.address & 7) == 0 &&
                (element_bytes(view.dtype) << shift) == 8) {}

    /// The elements of an item in type `dtype`; those behind the last are 0.
    IRIS_DEVICE void load(u32 item, u32 dtype, u32 (&data)[2]) const {
        const u64 first = u64(item) << shift;
        if (whole && first + (1u << shift) <= count && dtype == view.dtype) {
            const u64 bits = port::read<u64>(view.address + u64(item) * 8);
            data[0] = static_cast<u32>(bits);
            data[1] = static_cast<u32>(bits >> 32);
        } else {
            load_pieces(first, dtype, data);
        }
    }

    /// Put an item of elements of type `dtype` there.
    IRIS_DEVICE void store(u32 item, u32 dtype, const u32 (&data)[2]) const {
        const u64 first = u64(item) << shift;
        if (whole && first + (1u << shift) <= count && dtype == view.dtype) {
            port::write(view.address + u64(item) * 8, u64(data[1]) << 32 | data[0]);
        } else {
            IRIS_UNROLL
            for (u32 i = 0; i < 4; ++i) {
                if (i >= 1u << shift || first + i >= count) break;
                store_bits(first + i, dtype, element(data, dtype, i));
            }
        }
    }

    /// Put the values of an item there, rounded.
    IRIS_DEVICE void store(u32 item, const float (&values)[4]) const {
        const u64 first = u64(item) << shift;
        if (whole && first + (1u << shift) <= count) {
            u32 data[2];
            pack(view.dtype, values, data);
            port::write(view.address + u64(item) * 8, u64(data[1]) << 32 | data[0]);
            return;
        }
        IRIS_UNROLL
        for (u32 i = 0; i < 4; ++i) {
            if (i >= 1u << shift || first + i >= count) break;
            store_element(place(first + i), view.dtype, values[i]);
        }
    }

    /// The values of an item, and what an item of some values is.
    IRIS_DEVICE static void unpack(u32 dtype, const u32 (&data)[2], float (&values)[4]) {
        if (dtype == F32) {
            values[0] = __builtin_bit_cast(float, data[0]);
            values[1] = __builtin_bit_cast(float, data[1]);
            values[2] = values[3] = 0.0f;
            return;
        }
        IRIS_UNROLL
        for (u32 i = 0; i < 4; ++i) values[i] = widen(dtype, static_cast<u16>(data[i / 2] >> i % 2 * 16));
    }
    IRIS_DEVICE static void pack(u32 dtype, const float (&values)[4], u32 (&data)[2]) {
        IRIS_UNROLL
        for (u32 i = 0; i < 2; ++i) {
            data[i] = dtype == F32 ? __builtin_bit_cast(u32, values[i])
                                   : static_cast<u32>(narrow(dtype, values[2 * i])) |
                                         static_cast<u32>(narrow(dtype, values[2 * i + 1])) << 16;
        }
    }

  private:
    IRIS_DEVICE u64 place(u64 at) const {
        return view.at(static_cast<u32>(at / cols), static_cast<u32>(at % cols));
    }
    /// The bits of an element of an item.
    IRIS_DEVICE static u32 element(const u32 (&data)[2], u32 dtype, u32 i) {
        return dtype == F32 ? data[i & 1] : data[i / 2] >> i % 2 * 16 & 0xffff;
    }
    IRIS_DEVICE void store_bits(u64 at, u32 dtype, u32 bits) const {
        if (dtype == F32) port::write(place(at), bits);
        else port::write(place(at), static_cast<u16>(bits));
    }
    IRIS_DEVICE void load_pieces(u64 first, u32 dtype, u32 (&data)[2]) const {
        data[0] = data[1] = 0;
        IRIS_UNROLL
        for (u32 i = 0; i < 4; ++i) {
            if (i >= 1u << shift || first + i >= count) break;
            const u64 at = place(first + i);
            u32 bits;
            if (dtype != view.dtype) {
                const float value = load_element(at, view.dtype);
                bits = dtype == F32 ? __builtin_bit_cast(u32, value) : narrow(dtype, value);
            } else {
                bits = dtype == F32 ? port::read<u32>(at) : port::read<u16>(at);
            }
            // Of f32 there are two.
            if (dtype == F32) data[i & 1] = bits;
            else data[i / 2] |= bits << i % 2 * 16;
        }
    }

    const View view;
    const u64 count;
    const u32 cols, shift;
    const bool whole;
};

/// One lane's items of a call.
template <Collective C> class ExchangeBody {
    static constexpr bool REDUCES = C == Collective::AllReduce || C == Collective::ReduceScatter;

  public:
    IRIS_DEVICE explicit ExchangeBody(const OpArgs& args)
        : dtype(REDUCES ? args.wire : args.c.dtype),
          items(C, args.channel.size, args.m, args.n, 8 / element_bytes(dtype), args.root),
          args(args), sum{}, own{}, held{}, own_is_added(false) {}

    /// Type of what travels.
    const u32 dtype;
    const Items items;

    IRIS_DEVICE void load(u32 item) {
        // Where all peers get the same, it is read once.
        if constexpr (SAME_FOR_ALL) mine(me()).load(item, dtype, held);
    }

    IRIS_DEVICE void give(u32 peer, u32 item, u32 (&data)[2]) {
        if constexpr (SAME_FOR_ALL) {
            data[0] = held[0];
            data[1] = held[1];
        } else {
            mine(peer).load(item, dtype, data);
        }
        if (args.counters != 0) {
            Trace(0, 0, args.counters, 0).add(Counter::Pushed, PAIR_BYTES);
        }
    }

    IRIS_DEVICE void begin(u32 item) {
        if constexpr (REDUCES) {
            // It is under way while the others' are awaited.
            mine(me()).load(item, dtype, own);
            // Nothing but a negative zero leaves every number as it is.
            IRIS_UNROLL
            for (u32 i = 0; i < 4; ++i) sum[i] = -0.0f;
            own_is_added = false;
            if constexpr (C == Collective::ReduceScatter) add_own();
        } else {
            if (item >= items.sent(me(), me()) || args.a.address == args.c.address) return;
            u32 data[2];
            mine(me()).load(item, dtype, data);
            result(me()).store(item, dtype, data);
        }
    }

    IRIS_DEVICE void take(u32 source, u32 item, const u32 (&data)[2]) {
        if constexpr (REDUCES) {
            if (!own_is_added && source > me()) add_own();
            add(data);
        } else {
            result(source).store(item, dtype, data);
        }
    }

    IRIS_DEVICE void end(u32 item) {
        if constexpr (REDUCES) {
            if (!own_is_added) add_own();
            // A message has no bias.
            if (args.epilogue & EPILOGUE_GELU) {
                IRIS_UNROLL
                for (u32 i = 0; i < 4; ++i) sum[i] = gelu(sum[i]);
            }
            result(me()).store(item, sum);
        }
    }

  private:
    static constexpr u64 PAIR_BYTES = 16;
    static constexpr bool SAME_FOR_ALL =
        C == Collective::AllReduce || C == Collective::AllGather || C == Collective::Broadcast;

    IRIS_DEVICE u32 me() const { return args.channel.rank; }
    /// What this rank sends to `to`.
    IRIS_DEVICE ItemsOf mine(u32 to) const {
        return ItemsOf(View::of(args.a).from(items.source_row(to), 0), items.rows_sent(me(), to),
                       items.cols, items.shift);
    }
    /// Where what `source` sends belongs.
    IRIS_DEVICE ItemsOf result(u32 source) const {
        return ItemsOf(View::of(args.c).from(items.target_row(source, me()), 0),
                       items.rows_sent(source, me()), items.cols, items.shift);
    }
    IRIS_DEVICE void add(const u32 (&data)[2]) {
        float values[4];
        ItemsOf::unpack(dtype, data, values);
        IRIS_UNROLL
        for (u32 i = 0; i < 4; ++i) sum[i] += values[i];
    }
    IRIS_DEVICE void add_own() {
        add(own);
        own_is_added = true;
    }

    const OpArgs& args;
    float sum[4];
    u32 own[2], held[2];
    bool own_is_added;
};

template <Collective C> IRIS_DEVICE void run_exchange(const OpArgs& given) {
    // The body keeps a reference to them.
    const OpArgs& args = port::in_place(given);
    ExchangeBody<C> body(args);
    flow::exchange(launch_of(args), body.items, body);
}

} // namespace iris

#endif
