// Ranks of a communicator of the fake RCCL, which share a file in memory: their seats, and a collective
// of theirs on a stream.
#include <signal.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "iris/view.h"

namespace {

using iris::u16, iris::u32, iris::u64;
using Clock = std::chrono::steady_clock;
enum Outcome {
    SUCCESS = 0,
    SYSTEM_ERROR = 2,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    REMOTE_ERROR = 6,
    IN_PROGRESS = 7
};
enum Type { BYTE = 1, INT32 = 2, FLOAT16 = 6, FLOAT32 = 7, BFLOAT16 = 9 };

int outcome(int code, const std::string& call) {
    const char* file = std::getenv("FAKE_HIP_LOG");
    if (file != nullptr) std::ofstream(file, std::ios::app) << call + " = " + std::to_string(code) + "\n";
    return code;
}
/// Value of the environment variable `name` on rank `rank`: a number for all ranks, or "R:number" for
/// rank R, where the others get `otherwise`.
u64 setting(const char* name, u64 rank, u64 otherwise) {
    const char* text = std::getenv(name);
    if (text == nullptr || *text == 0) return otherwise;
    const char* value = std::strchr(text, ':');
    if (value == nullptr) return std::stoull(text);
    return std::stoull(text) == rank ? std::stoull(value + 1) : otherwise;
}
void pause() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

constexpr u64 MOST_RANKS = 16, MOST_PARTS = 64, ROOM = 16 << 20;
enum State : u32 { ABSENT, JOINED, LEAVING, GONE };
/// Part of a rank's input, at byte `at` of its seat: for one peer, or for all.
struct Part {
    u64 peer, at, bytes;
};
constexpr u64 ALL = ~0ull;
/// Kind of a call, number and type of its elements, and its root: equal on all ranks.
using Call = std::array<u64, 4>;
/// Shared state of a rank, as the other ranks see it.
struct Seat {
    std::atomic<u32> state;
    int process;
    /// Number of times that the rank has arrived where all ranks meet.
    std::atomic<u64> arrived;
    Call call;
    u64 count;
    Part parts[MOST_PARTS];
    char data[ROOM];
    /// Part number `number` for `peer`; null if there are fewer.
    const Part* part(u64 peer, u64 number) const {
        for (const Part* it = parts; it < parts + count; ++it) {
            if (it->peer == peer && number-- == 0) return it;
        }
        return nullptr;
    }
};

struct Communicator {
    Communicator(void* seats, u64 size, u64 rank, int device, bool blocking)
        : seats(static_cast<Seat*>(seats)), size(size), rank(rank), blocking(blocking), device(device) {}
    ~Communicator() { munmap(seats, size * sizeof(Seat)); }
    Seat& seat() { return seats[rank]; }
    bool all_are(State state) {
        for (u64 at = 0; at < size; ++at) {
            if (seats[at].state < state) return false;
        }
        return true;
    }
    void fail(int code, const std::string& why) {
        int none = SUCCESS;
        if (!error.compare_exchange_strong(none, code)) return;
        outcome(code, "error of rank " + std::to_string(rank) + ": " + why);
    }
    /// Fails if a rank that has not arrived `times` times has aborted its communicator or ended.
    void look_for_lost(u64 times) {
        for (u64 at = 0; at < size; ++at) {
            const Seat& it = seats[at];
            const bool dead = it.state == JOINED && kill(it.process, 0) != 0 && errno == ESRCH;
            if (it.arrived >= times || (it.state != GONE && !dead)) continue;
            fail(REMOTE_ERROR, "rank " + std::to_string(at) + " is lost");
        }
    }
    /// Waits until all ranks have arrived as often as this one; false if the communicator was aborted,
    /// without which nothing ends the wait for a rank that is lost.
    bool meet() {
        const u64 times = ++seat().arrived;
        const auto arrived = [&] {
            for (u64 at = 0; at < size; ++at) {
                if (seats[at].arrived < times) return false;
            }
            return true;
        };
        for (u64 looks = 0; error != SUCCESS || !arrived(); ++looks) {
            if (aborted) return false;
            if (looks % 64 == 63) look_for_lost(times);
            pause();
        }
        return true;
    }

    Seat* const seats;
    const u64 size, rank;
    const bool blocking;
    const int device;
    std::atomic<bool> aborted{false};
    std::atomic<int> error{SUCCESS};
    /// Number of collectives that are enqueued and have not ended.
    std::atomic<u64> queued{0};
    /// Held by the collective that runs.
    std::mutex running;
    u64 calls = 0;
    /// Guards the fields below.
    std::mutex own;
    /// Advances the call in progress, and returns whether the library has accepted it.
    std::function<bool()> progress;
    u64 answers = 0;
    bool closed = false;
};

struct Block {
    u64 address, bytes, peer = ALL;
};
using Blocks = std::vector<Block>;
/// Writes the outputs of a collective; false if the ranks' inputs do not match.
using Finish = std::function<bool(const Seat* seats)>;

/// Collective number `number` of the communicator, on its stream.
void run(Communicator& of, u64 number, const Call& call, const Blocks& from, const Finish& finish) {
    std::lock_guard running(of.running);
    const auto begins = Clock::now() + std::chrono::milliseconds(setting("FAKE_RCCL_DELAY", of.rank, 0));
    while (!of.aborted && Clock::now() < begins) pause();
    if (of.aborted) return;
    if (setting("FAKE_RCCL_FAILS", of.rank, 0) == number) of.fail(SYSTEM_ERROR, "a test asked for it");
    Seat& seat = of.seat();
    seat.call = call, seat.count = 0;
    u64 at = 0;
    for (const Block& one : from) {
        std::memcpy(seat.data + at, reinterpret_cast<const void*>(one.address), one.bytes);
        seat.parts[seat.count++] = {one.peer, at, one.bytes};
        at += one.bytes;
    }
    if (!of.meet()) return;
    bool equal = true;
    for (u64 rank = 0; rank < of.size; ++rank) equal = equal && of.seats[rank].call == call;
    if (!equal || !finish(of.seats)) of.fail(INVALID_USAGE, "the ranks' collectives differ");
    of.meet();
}

u64 size_of(int type) {
    switch (type) {
    case BYTE: return 1;
    case FLOAT16:
    case BFLOAT16: return 2;
    case INT32:
    case FLOAT32: return 4;
    default: return 0;
    }
}
/// Adds the element number `at` of all ranks' inputs, in the order of ranks, to element `place` at `to`.
void add(int type, const Seat* seats, u64 size, u64 at, u64 to, u64 place) {
    const u32 narrow = type == FLOAT16 ? iris::F16 : iris::BF16;
    float sum = 0;
    u32 whole = 0;
    for (u64 rank = 0; rank < size; ++rank) {
        u32 bits = 0;
        std::memcpy(&bits, seats[rank].data + at * size_of(type), size_of(type));
        float value;
        std::memcpy(&value, &bits, 4);
        sum += size_of(type) == 2 ? iris::widen(narrow, static_cast<u16>(bits)) : value;
        whole += bits;
    }
    u32 bits;
    std::memcpy(&bits, &sum, 4);
    if (size_of(type) == 2) bits = iris::narrow(narrow, sum);
    if (type == INT32) bits = whole;
    std::memcpy(reinterpret_cast<char*>(to) + place * size_of(type), &bits, size_of(type));
}

} // namespace
