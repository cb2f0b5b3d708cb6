// Fake of RCCL that computes on the host, for tests of its callers. Ranks are threads of one
// process; a collective is done on the streams when those of all ranks have reached it. The fake is
// stricter than AMD's library: the communicator's device must be current, and buffers must be that
// device's. Passing tests on the fake say nothing about AMD's library.
//
// Environment variables: FAKE_HIP_LOG (file to which calls are logged), FAKE_RCCL_REFUSES (no id is
// returned unless HSA_NO_SCRATCH_RECLAIM is 1, as on devices with old firmware).
#include <dlfcn.h>

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;
enum Outcome { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4 };
enum Type { INT32 = 2, FLOAT16 = 6, FLOAT32 = 7, BFLOAT16 = 9 };
enum Sum { SUM = 0 };
struct Id {
    char bytes[128];
};

int outcome(int code, const std::string& call) {
    const char* file = std::getenv("FAKE_HIP_LOG");
    if (file != nullptr) std::ofstream(file, std::ios::app) << call << " = " << code << "\n";
    return code;
}
template <class Function> Function runtime(const char* name) {
    static void* library = dlopen("libamdhip64.so.7", RTLD_NOW | RTLD_NOLOAD);
    return library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, name));
}
int current() {
    int device = -1;
    runtime<int (*)(int*)>("hipGetDevice")(&device);
    return device;
}

/// State that the ranks of a communicator share.
struct World {
    explicit World(u64 size) : size(size), from(size), to(size) {}
    /// Waits until all ranks have arrived; the last one to arrive runs `last` before all go on.
    void meet(const std::function<void()>& last) {
        std::unique_lock guard(own);
        const u64 round = rounds;
        if (++here == size) {
            last();
            here = 0, ++rounds;
            changed.notify_all();
        } else {
            changed.wait(guard, [&] { return rounds != round; });
        }
    }
    u64 size;
    /// Addresses that each rank reads (`from`) and writes (`to`) in a collective; in an all-to-all,
    /// one for each peer.
    std::vector<std::vector<u64>> from, to;
    std::mutex own;
    std::condition_variable changed;
    u64 here = 0, rounds = 0;
};
struct Communicator {
    std::shared_ptr<World> world;
    u64 rank;
    int device;
};
std::mutex lock;
std::map<std::string, std::shared_ptr<World>> worlds;

u64 size_of(int type) { return type == INT32 || type == FLOAT32 ? 4 : type == FLOAT16 || type == BFLOAT16 ? 2 : 0; }

/// Sums the element number `at` over the buffers of all ranks. f16 is not supported.
void add(int type, const std::vector<std::vector<u64>>& from, u64 at, u64 to, u64 place) {
    float sum = 0;
    std::int32_t whole = 0;
    for (const std::vector<u64>& one : from) {
        u32 bits = 0;
        std::memcpy(&bits, reinterpret_cast<const char*>(one[0]) + at * size_of(type), size_of(type));
        if (type == BFLOAT16) bits <<= 16;
        float value;
        std::memcpy(&value, &bits, 4);
        sum += value;
        whole += static_cast<std::int32_t>(bits);
    }
    u32 bits;
    std::memcpy(&bits, &sum, 4);
    if (type == INT32) bits = static_cast<u32>(whole);
    if (type == BFLOAT16) bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    std::memcpy(reinterpret_cast<char*>(to) + place * size_of(type), &bits, size_of(type));
}
void copy(u64 to, u64 from, u64 bytes) { std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); }

/// Enqueues the collective `name` on `stream`. When the streams of all ranks have reached it, the
/// last rank runs `last`.
int collective(const char* name, Communicator* of, std::vector<u64> from, std::vector<u64> to, u64 reads, u64 writes,
               void* stream, std::function<void(World&)> last) {
    const auto reaches = runtime<bool (*)(int, u64, u64)>("fake_reaches");
    bool good = current() == of->device && reads > 0 && writes > 0;
    for (u64 one : from) good = good && reaches(of->device, one, reads);
    for (u64 one : to) good = good && reaches(of->device, one, writes);
    if (!good) return outcome(INVALID_ARGUMENT, name);
    const auto world = of->world;
    const u64 rank = of->rank;
    auto* work = new std::function<void()>([=] {
        // All ranks must have stored their addresses before one runs the collective.
        world->from[rank] = from, world->to[rank] = to;
        world->meet([&] { last(*world); });
    });
    const auto run = [](void* data) {
        auto* work = static_cast<std::function<void()>*>(data);
        (*work)();
        delete work;
    };
    const auto enqueue = runtime<int (*)(void*, void (*)(void*), void*)>("hipLaunchHostFunc");
    return outcome(enqueue(stream, run, work) == 0 ? SUCCESS : INVALID_ARGUMENT, name);
}

/// Sends and receives since ncclGroupStart, which ncclGroupEnd enqueues together.
struct Group {
    bool open = false;
    Communicator* of = nullptr;
    std::vector<u64> from, to;
    u64 bytes = 0;
    void* stream = nullptr;
};
thread_local Group group;

int part(std::vector<u64> Group::*which, u64 address, u64 count, int type, int peer, Communicator* of, void* stream) {
    const bool next = group.open && peer >= 0 && (group.*which).size() == static_cast<u64>(peer);
    if (!next || size_of(type) == 0) return outcome(INVALID_ARGUMENT, "ncclSend or ncclRecv");
    (group.*which).push_back(address);
    group.of = of, group.bytes = count * size_of(type), group.stream = stream;
    return SUCCESS;
}

} // namespace

extern "C" {

int ncclGetVersion(int* version) {
    *version = 22707;
    return SUCCESS;
}
const char* ncclGetErrorString(int code) {
    return code == SUCCESS ? "no error" : code == SYSTEM_ERROR ? "unhandled system error" : "invalid argument";
}
const char* ncclGetLastError(Communicator*) { return "scratch memory is reclaimed"; }
int ncclGetUniqueId(Id* id) {
    const char* kept = std::getenv("HSA_NO_SCRATCH_RECLAIM");
    if (std::getenv("FAKE_RCCL_REFUSES") != nullptr && (kept == nullptr || std::strcmp(kept, "1") != 0)) return SYSTEM_ERROR;
    static int count = 0;
    std::lock_guard guard(lock);
    std::memset(id->bytes, 0, sizeof id->bytes);
    std::strcpy(id->bytes, std::to_string(++count).c_str());
    return SUCCESS;
}
int ncclCommInitRankConfig(Communicator** to, int size, Id id, int rank, void*) {
    std::shared_ptr<World> world;
    {
        std::lock_guard guard(lock);
        auto& known = worlds[id.bytes];
        if (known == nullptr) known = std::make_shared<World>(size);
        world = known;
    }
    if (id.bytes[0] == 0 || rank < 0 || rank >= size) return outcome(INVALID_ARGUMENT, "ncclCommInitRankConfig");
    world->meet([] {});
    *to = new Communicator{world, static_cast<u64>(rank), current()};
    return outcome(SUCCESS, "ncclCommInitRankConfig " + std::to_string(rank) + " on " + std::to_string(current()));
}
int ncclCommGetAsyncError(Communicator*, int* state) {
    *state = SUCCESS;
    return SUCCESS;
}
int ncclCommFinalize(Communicator*) { return SUCCESS; }
int ncclCommDestroy(Communicator* of) {
    delete of;
    return SUCCESS;
}
int ncclCommAbort(Communicator* of) { return ncclCommDestroy(of); }
int ncclCommWindowRegister(Communicator* of, u64 memory, u64 bytes, Communicator** window, int flags) {
    const auto reaches = runtime<bool (*)(int, u64, u64)>("fake_reaches");
    const bool good = current() == of->device && reaches(of->device, memory, bytes) && flags == 1;
    of->world->meet([] {});
    *window = of;
    return outcome(good ? SUCCESS : INVALID_ARGUMENT, "ncclCommWindowRegister");
}
int ncclCommWindowDeregister(Communicator* of, Communicator* window) {
    return outcome(of == window ? SUCCESS : INVALID_ARGUMENT, "ncclCommWindowDeregister");
}

int ncclAllReduce(u64 from, u64 to, u64 count, int type, int sum, Communicator* of, void* stream) {
    const u64 bytes = count * size_of(type);
    if (sum != SUM || type == FLOAT16) return outcome(INVALID_ARGUMENT, "ncclAllReduce");
    return collective("ncclAllReduce", of, {from}, {to}, bytes, bytes, stream, [=](World& all) {
        std::vector<char> sums(bytes);
        for (u64 at = 0; at < count; ++at) add(type, all.from, at, reinterpret_cast<u64>(sums.data()), at);
        for (const auto& one : all.to) copy(one[0], reinterpret_cast<u64>(sums.data()), bytes);
    });
}
int ncclReduceScatter(u64 from, u64 to, u64 count, int type, int sum, Communicator* of, void* stream) {
    const u64 bytes = count * size_of(type);
    if (sum != SUM || type == FLOAT16) return outcome(INVALID_ARGUMENT, "ncclReduceScatter");
    return collective("ncclReduceScatter", of, {from}, {to}, bytes * of->world->size, bytes, stream, [=](World& all) {
        for (u64 at = 0; at < count * all.size; ++at) add(type, all.from, at, all.to[at / count][0], at % count);
    });
}
int ncclAllGather(u64 from, u64 to, u64 count, int type, Communicator* of, void* stream) {
    const u64 bytes = count * size_of(type);
    return collective("ncclAllGather", of, {from}, {to}, bytes, bytes * of->world->size, stream, [=](World& all) {
        for (const auto& one : all.to) {
            for (u64 rank = 0; rank < all.size; ++rank) copy(one[0] + rank * bytes, all.from[rank][0], bytes);
        }
    });
}
int ncclBroadcast(u64 from, u64 to, u64 count, int type, int root, Communicator* of, void* stream) {
    const u64 bytes = count * size_of(type);
    return collective("ncclBroadcast", of, {from}, {to}, bytes, bytes, stream, [=](World& all) {
        for (const auto& one : all.to) copy(one[0], all.from[root][0], bytes);
    });
}
int ncclGroupStart() {
    group = Group{true, nullptr, {}, {}, 0, nullptr};
    return SUCCESS;
}
int ncclSend(u64 from, u64 count, int type, int peer, Communicator* of, void* stream) {
    return part(&Group::from, from, count, type, peer, of, stream);
}
int ncclRecv(u64 to, u64 count, int type, int peer, Communicator* of, void* stream) {
    return part(&Group::to, to, count, type, peer, of, stream);
}
int ncclGroupEnd() {
    const Group all = group;
    group = Group{};
    const u64 bytes = all.bytes;
    const bool good = all.of != nullptr && all.from.size() == all.of->world->size && all.to.size() == all.from.size();
    if (!good) return outcome(INVALID_ARGUMENT, "ncclGroupEnd");
    return collective("ncclGroupEnd", all.of, all.from, all.to, bytes, bytes, all.stream, [=](World& world) {
        for (u64 rank = 0; rank < world.size; ++rank) {
            for (u64 peer = 0; peer < world.size; ++peer) copy(world.to[peer][rank], world.from[rank][peer], bytes);
        }
    });
}
}
