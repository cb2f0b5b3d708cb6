// Protocols without one of their waits, in host code: the skeletons of the device headers over the
// small tiles of the models, with one thread for each workgroup of each rank. `iris stress` does
// the same on GPUs, where a build fixes which wait is left out and which workgroup is delayed; here
// both are variables.
//
// Arguments: subject, access that is not waited for, place, nanoseconds, calls; words of a signal
// segment, device words; the words of a channel. Prints the number of wrong values.
#include <cstdio>
#include <cstdlib>

static int held_without = -1;
static int held_place = -1;
static unsigned held_ns = 1;
#define IRIS_TEST_NO_WAIT held_without
#define IRIS_TEST_HOLD held_place
#define IRIS_TEST_HOLD_NS held_ns

#include "hooks.cpp"
#include "ll.cpp"
#include "ops.cpp"
#include "primitives.cpp"

namespace {

std::atomic<u32> wrong;
/// Boundary between two launches of this rank, a barrier of all its workgroups.
thread_local std::barrier<>* boundary;

/// Tile operations that fill C with an invalid value before each call.
struct HeldTiles : Tiles {
    void fill_out() const {
        hold<Hold::Filling>(me());
        for (u32 i = 0; i < ranks() * in.tiles; ++i) put(cell(me(), OUT, i), -1);
        iris_model_boundary();
    }
    void add(u32 owner, u32 tile) {
        const u64 place = at(owner, WORK, 0, tile, mine());
        const i32 sum = get(place);
        hold<Hold::Adding>(me());
        put(place, sum + produced(tile, mine()));
    }
};

/// Delivery of tiles for a broadcast from the last rank.
struct FromLast {
    u32 tiles, me, last;
    u32 produced() const { return sent(me, 0); }
    u32 sent(u32 from, u32) const { return from == last ? tiles : 0; }
};

void sleep_ns(u64 ns) {
    for (const u64 begun = port::now(); port::now() - begun < ns;) port::sleep(1000);
}

int all_gather(const Input& in) {
    return calls(in, [&](const Model& model) {
        HeldTiles body{{model}};
        body.fill_out();
        const bool done =
            flow::deliver(model.launch(), Delivery{in.tiles, body.me(), false}, 0, body);
        iris_model_boundary();
        for (u32 source = 0; source < body.ranks(); ++source) {
            if (source == body.me() || !done) continue;
            body.consume(source, [&](u32 tile, u32 element) {
                return value(source, body.call, tile, element);
            });
        }
        return done;
    });
}

int broadcast(const Input& in) {
    u32 call = 0;
    return calls(in, [&](const Model& model) {
        HeldTiles body{{model}};
        const u32 last = body.ranks() - 1;
        // The root ends its first call, and waits half the delay: the other ranks see its entry and
        // its signals, and are held. Then it runs ahead of them, while they are held.
        if (call++ == 1 && body.me() == last) sleep_ns(held_ns / 2);
        return flow::deliver(model.launch(), FromLast{in.tiles, body.me(), last}, 0, body);
    });
}

int spinlock(const Input& in) { return accumulate<HeldTiles>(in); }

/// All-gather by a copy engine and a GEMM in one launch, which waits for each part itself.
int copied_beside(const Input& in) {
    Input beside = in;
    beside.option = 4;
    return iris_model_copied(beside);
}

/// Transfer from rank 0 to rank 1, by one workgroup of each.
int message(const Input& in) {
    if (port::workgroup() != 0 || in.channel->rank > 1) return 1;
    return hand_over(in, [] { hold<Hold::Filling>(0); });
}

constexpr struct {
    const char* name;
    int (*run)(const Input&);
    bool direct;
} SUBJECTS[] = {
    {"broadcast", broadcast, false},
    {"all_gather", all_gather, true},
    {"one_shot", iris_model_one_shot, false},
    {"pull", iris_model_pull, false},
    {"gather", iris_model_gather, false},
    {"message", message, false},
    {"spinlock", spinlock, false},
    {"staged", iris_model_staged, false},
    {"exchange", iris_model_exchange, false},
    {"copied", iris_model_copied, false},
    {"copied_beside", copied_beside, false},
    {"stored", iris_model_stored, false},
};

} // namespace

extern "C" {
void iris_model_boundary(void) { boundary->arrive_and_wait(); }
int iris_model_gives_up(void) { return 0; }
void iris_model_check(u64, i32 seen, i32 wanted) { wrong += seen != wanted; }
}

namespace {

constexpr u32 GROUPS = 2, TILES = 2;

struct Rank {
    std::vector<i32> data = std::vector<i32>(18 * 256), signal, device;
    alignas(64) i32 control[16] = {};
    HeapView heap{};
    Channel channel;
    Record record{};
    std::barrier<> launches{GROUPS};
};

/// Runs calls of a subject over all ranks of a channel; returns whether every rank succeeded.
bool run(int (*subject)(const Input&), bool direct, u32 count, const Channel& laid_out, u32 words,
         u32 device_words) {
    const u32 size = laid_out.size;
    std::vector<std::unique_ptr<Rank>> ranks;
    for (u32 rank = 0; rank < size; ++rank) {
        Rank& own = *ranks.emplace_back(std::make_unique<Rank>());
        own.signal.resize(words);
        own.device.resize(device_words);
        own.channel = laid_out;
        own.channel.rank = rank;
        own.device[own.channel.call] = 1;
        own.record.direct = direct;
    }
    const std::vector<u32> used(count, TILES);
    std::atomic<bool> through = true;
    std::vector<std::thread> threads;
    std::vector<std::unique_ptr<Group>> groups;
    for (u32 rank = 0; rank < size; ++rank) {
        Rank& own = *ranks[rank];
        own.heap.rank = rank;
        own.heap.size = size;
        for (u32 at = 0; at < size; ++at) {
            own.heap.data[at] = reinterpret_cast<u64>(ranks[at]->data.data());
            own.heap.signal[at] = reinterpret_cast<u64>(ranks[at]->signal.data());
        }
        own.heap.control = reinterpret_cast<u64>(own.control);
        own.heap.device_words = reinterpret_cast<u64>(own.device.data());
        own.heap.entry_deadline_ns = own.heap.progress_deadline_ns = 60'000'000'000ull;
    }
    for (u32 at = 0; at < size * GROUPS; ++at) {
        groups.push_back(std::make_unique<Group>(at % GROUPS, GROUPS));
        threads.emplace_back([&, own = ranks[at / GROUPS].get(), here = groups.back().get()] {
            group = here;
            thread_index = rounds = 0;
            boundary = &own->launches;
            const Input in{&own->heap, &own->channel, &own->record,       1,           count,
                           TILES,      0,             (1ull << size) - 1, used.data(), 0};
            if (subject(in) == 0) through = false;
        });
    }
    for (std::thread& thread : threads) thread.join();
    return through;
}

} // namespace

int main(int count, char** values) {
    Channel channel;
    constexpr int FIELDS_OF_CHANNEL = sizeof(Channel) / 4;
    if (count != 8 + FIELDS_OF_CHANNEL) return 2;
    const auto number = [&](int at) { return static_cast<u32>(std::strtol(values[at], nullptr, 10)); };
    u32 fields[FIELDS_OF_CHANNEL];
    for (int i = 0; i < FIELDS_OF_CHANNEL; ++i) fields[i] = number(8 + i);
    std::memcpy(&channel, fields, sizeof channel);
    held_without = static_cast<int>(number(2));
    held_place = static_cast<int>(number(3));
    held_ns = number(4);
    for (const auto& subject : SUBJECTS) {
        if (std::strcmp(subject.name, values[1]) != 0) continue;
        const bool through =
            run(subject.run, subject.direct, number(5), channel, number(6), number(7));
        std::printf("%u wrong%s\n", wrong.load(), through ? "" : ", and gave up");
        return 0;
    }
    return 2;
}
