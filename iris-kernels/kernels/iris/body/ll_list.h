// Body of an all-gather of a list of tensors by the LL protocol. A row of the message is a row of each tensor,
// one after the other, each padded to whole items of 8 bytes. Bytes are moved without regard to element types.
#ifndef IRIS_BODY_LL_LIST_H
#define IRIS_BODY_LL_LIST_H

#include "iris/args.h"

namespace iris {

/// Bytes of memory whose values are those of one item.
struct Piece {
    u64 address;
    /// Number of bytes, from 1 to 8.
    u32 bytes;

    /// Whether the bytes are one aligned word.
    IRIS_DEVICE bool is_whole() const { return ((static_cast<u32>(address) | bytes) & 7) == 0; }
    /// Largest of 1, 2 and 4 of which address and number of bytes are multiples, in a piece that is not whole.
    IRIS_DEVICE u32 step() const {
        const u32 both = static_cast<u32>(address) | bytes;
        return both & 1 ? 1 : both & 2 ? 2 : 4;
    }
};

/// Loads a piece step by step; the bytes of the item after its end are 0.
IRIS_COLD u64 load_piece(Piece from) {
    const u32 step = from.step();
    u64 item = 0;
    IRIS_NO_UNROLL
    for (u32 at = 0; at < from.bytes; at += step) {
        const u64 address = from.address + at;
        const u32 part = step == 4   ? port::read<u32>(address)
                         : step == 2 ? port::read<u16>(address)
                                     : port::read<u8>(address);
        item |= u64(part) << 8 * at;
    }
    return item;
}

IRIS_COLD void store_piece(Piece to, u64 item) {
    const u32 step = to.step();
    IRIS_NO_UNROLL
    for (u32 at = 0; at < to.bytes; at += step) {
        const u64 address = to.address + at;
        const u32 part = static_cast<u32>(item >> 8 * at);
        if (step == 4) port::write(address, part);
        else if (step == 2) port::write(address, static_cast<u16>(part));
        else port::write(address, static_cast<u8>(part));
    }
}

class ListBody {
    using Data = u32[2];

  public:
    IRIS_DEVICE explicit ListBody(const OpArgs& args)
        : items(Collective::AllGather, args.channel.size, args.m, row_items(args), 1, 0), args(args), held{} {}

    const Items items;

    /// Number of items that `from` sends to `to`.
    IRIS_DEVICE u32 sent(u32 from, u32 to) const { return items.sent(from, to); }

    IRIS_DEVICE void load(u32 first, u32 item) {
        // All peers get the same data, so it is loaded once.
        if (first == 1) load_own(item, held);
    }
    IRIS_DEVICE void give(u32, u32, u32, Data& data) {
        data[0] = held[0];
        data[1] = held[1];
        if (args.counters != 0) Trace(0, 0, args.counters, 0).add(Counter::Pushed, ll::Ll64::BYTES);
    }
    /// Copies this rank's own item to its place among the rows of all ranks.
    IRIS_DEVICE void begin(u32 item) {
        if (item >= sent(me(), me())) return;
        Data data;
        load_own(item, data);
        take(me(), item, data);
    }
    IRIS_DEVICE void take(u32 source, u32 item, const Data& data) {
        const u64 bits = u64(data[1]) << 32 | data[0];
        const Piece to = piece(item, [&](const ListTensor& tensor, u32 row) IRIS_INLINE {
            return tensor.to + (items.target_row(source, me()) + row) * tensor.to_pitch;
        });
        if (to.is_whole()) port::write(to.address, bits);
        else store_piece(to, bits);
    }
    IRIS_DEVICE void end(u32) {}

  private:
    IRIS_DEVICE static u32 items_of(const ListTensor& tensor) { return static_cast<u32>((tensor.row + 7) / 8); }
    IRIS_DEVICE static u32 row_items(const OpArgs& args) {
        u32 all = 0;
        IRIS_UNROLL
        for (u32 i = 0; i < MOST_TENSORS; ++i) all += items_of(args.list[i]);
        return all;
    }
    IRIS_DEVICE u32 me() const { return args.channel.rank; }

    /// Bytes of item `item` of one rank's rows. `row_at(tensor, row)` is the address of a row of these rows.
    template <class RowAt> IRIS_DEVICE Piece piece(u32 item, RowAt row_at) const {
        const u32 row = item / items.cols;
        u32 tensor = 0, at = item % items.cols;
        IRIS_NO_UNROLL
        for (; tensor + 1 < MOST_TENSORS && at >= items_of(args.list[tensor]); ++tensor) {
            at -= items_of(args.list[tensor]);
        }
        const ListTensor& of = args.list[tensor];
        const u64 first = u64(at) * 8, left = of.row - first;
        return Piece{row_at(of, row) + first, left < 8 ? static_cast<u32>(left) : 8};
    }
    IRIS_DEVICE void load_own(u32 item, Data& data) const {
        const Piece from = piece(item, [&](const ListTensor& tensor, u32 row) IRIS_INLINE {
            return tensor.from + row * tensor.from_pitch;
        });
        const u64 bits = from.is_whole() ? port::read<u64>(from.address) : load_piece(from);
        data[0] = static_cast<u32>(bits);
        data[1] = static_cast<u32>(bits >> 32);
    }

    const OpArgs& args;
    /// This rank's item for the next pushes.
    Data held;
};

template <u32 N> IRIS_DEVICE void run_gather_list_of(const OpArgs& args) {
    ListBody body(args);
    const flow::ExchangeArgs<N> given = exchange_args<N>(args, body);
    port::take_turn();
    flow::exchange<N>(launch_of(args), given, body, body);
}

/// Copies the tensors of a world of one rank, which has no words of the LL protocol.
IRIS_DEVICE void copy_list(const OpArgs& args) {
    port::take_turn();
    ListBody body(args);
    const u32 all = body.sent(0, 0), threads = port::threads();
    IRIS_NO_UNROLL
    for (u64 item = u64(port::workgroup()) * threads + port::thread(); item < all;
         item += u64(port::workgroups()) * threads) {
        body.begin(static_cast<u32>(item));
    }
}

IRIS_DEVICE void run_gather_list(const OpArgs& given) {
    // Arguments in parameter memory, because the body keeps a reference to them.
    const OpArgs& args = port::in_place(given);
    if (args.channel.size == 1) copy_list(args);
    else if (args.channel.size == 2) run_gather_list_of<1>(args);
    else if (args.channel.size <= ll::FEW) run_gather_list_of<ll::FEW>(args);
    else run_gather_list_of<ll::SOURCES>(args);
}

} // namespace iris

#endif
