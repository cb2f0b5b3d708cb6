// Fake of RCCL that computes on the host, for tests of its callers. Ranks are threads or processes of
// one host. They share a file in memory with a seat for each rank: a collective on a stream copies the
// rank's input to its seat, waits for the other ranks, and computes its output from all seats. All
// ranks take part in each group of sends and receives.
//
// Calls on a non-blocking communicator are in progress until ncclCommGetAsyncError has said so a number
// of times, and only then enqueued. The fake is stricter than AMD's library. It refuses a call on a
// communicator that was aborted or has a call in progress, on another device than the current one, or
// with memory that the device cannot access. Collectives that differ between ranks are an asynchronous
// error. Passing tests on the fake say nothing about AMD's library.
//
// Environment variables: FAKE_HIP_LOG (file to which calls are logged), FAKE_RCCL_REFUSES (no id is
// returned unless HSA_NO_SCRATCH_RECLAIM is 1, as on devices with old firmware),
// FAKE_RCCL_ABORTS_AT_EXIT (the library's exit handler aborts the process). The value of each of
// the following holds for all ranks of a communicator, or for rank R if it is "R:value":
// FAKE_RCCL_ANSWERS (2; number of times that a call is in progress), FAKE_RCCL_JOINS (0; milliseconds
// after which a rank joins its communicator), FAKE_RCCL_DELAY (0; milliseconds for which a collective
// waits on its stream first), FAKE_RCCL_FAILS (none; number of the collective, counted from 1, which
// ends in an asynchronous error), FAKE_RCCL_STALLS (none; number of the collective, counted from 1, which
// stays in progress), FAKE_RCCL_GRAPHS (0; if 1, the calls that free a communicator never
// return, as if a graph with its collectives existed).
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <limits>
#include <map>
#include <memory>
#include <utility>

#include "seats.h"

namespace {

/// Exit handler of the library.
struct AtExit {
    ~AtExit() {
        if (std::getenv("FAKE_RCCL_ABORTS_AT_EXIT") != nullptr) std::abort();
    }
} at_exit;

enum Sum { SUM = 0 };
/// File of a communicator, as a process has opened it.
struct Id {
    int process, file;
    char rest[120];
};
/// ncclConfig_t of release 2.18.
struct Config {
    u64 size;
    u32 magic, version;
    int blocking, cluster, least_blocks, most_blocks;
    const char* network;
    int split;
};
/// Value of a field of Config that takes its default.
constexpr int UNSET = std::numeric_limits<int>::min();

/// Text of the last failure, for ncclGetLastError.
thread_local std::string last;
int refused(int code, const std::string& call, const char* why) {
    last = why;
    return outcome(code, call + ": " + why);
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

using Shared = std::shared_ptr<Communicator>;

std::mutex lock;
/// Communicators that were neither aborted nor destroyed.
auto& live = *new std::map<const void*, Shared>;
Shared find(const void* handle) {
    std::lock_guard guard(lock);
    const auto found = live.find(handle);
    return found == live.end() ? nullptr : found->second;
}

/// Advances the call in progress, and returns the state of the communicator.
int state_of(Communicator& of) {
    std::lock_guard guard(of.own);
    if (of.progress && of.error == SUCCESS) {
        if (of.answers > 0) return --of.answers, IN_PROGRESS;
        if (!of.progress()) return IN_PROGRESS;
    }
    of.progress = nullptr;
    return of.error;
}
/// Begins a call, which the library has taken when `progress` returns true.
int begin(Communicator& of, std::function<bool()> progress) {
    {
        std::lock_guard guard(of.own);
        of.progress = std::move(progress);
        of.answers = of.blocking ? 0 : setting("FAKE_RCCL_ANSWERS", of.rank, 2);
    }
    int state = state_of(of);
    for (; of.blocking && state == IN_PROGRESS; state = state_of(of)) pause();
    return state;
}
/// Why no call can be made on `of`; null if one can.
const char* busy(const Shared& of) {
    if (of == nullptr) return "no live communicator";
    std::lock_guard guard(of->own);
    return of->progress ? "a call is in progress" : of->closed ? "the communicator is closed" : nullptr;
}

/// Begins the collective `name`: of `call`, from the blocks `from` to the blocks `to`.
int collective(const std::string& name, const void* handle, const Call& call, const Blocks& from, const Blocks& to,
               void* stream, const Finish& finish) {
    const Shared of = find(handle);
    if (const char* why = busy(of)) return refused(INVALID_USAGE, name, why);
    if (current() != of->device) return refused(INVALID_USAGE, name, "another device is current");
    if (of->error != SUCCESS) return refused(of->error, name, "the communicator has failed");
    u64 all = 0;
    const auto reaches = runtime<bool (*)(int, u64, u64)>("standin_reaches");
    for (const Blocks* blocks : {&from, &to}) {
        for (const Block& one : *blocks) {
            const bool good = one.bytes > 0 && reaches(of->device, one.address, one.bytes);
            if (!good) return refused(INVALID_ARGUMENT, name, "memory that the device cannot access");
        }
    }
    for (const Block& one : from) all += one.bytes;
    if (all > ROOM || from.size() > MOST_PARTS) return refused(INVALID_ARGUMENT, name, "too large for the fake");
    const u64 number = ++of->calls;
    if (setting("FAKE_RCCL_STALLS", of->rank, 0) == number) return begin(*of, [] { return false; });
    return begin(*of, [=] {
        auto* work = new std::function<void()>([=] {
            run(*of, number, call, from, finish);
            --of->queued;
        });
        const auto once = [](void* data) {
            const std::unique_ptr<std::function<void()>> work(static_cast<std::function<void()>*>(data));
            (*work)();
        };
        const auto set = runtime<int (*)(int)>("hipSetDevice");
        const int before = current();
        ++of->queued;
        set(of->device);
        using Enqueue = u32 (*)(void*, const char*, const char*, void (*)(void*), void*);
        const u32 code = runtime<Enqueue>("standin_enqueue")(stream, name.c_str(), "", once, work);
        set(before);
        if (code != 0) of->fail(INVALID_ARGUMENT, name + " on a stream of another device");
        else outcome(SUCCESS, name);
        return true;
    });
}

void copy(u64 to, const char* from, u64 bytes) { std::memcpy(reinterpret_cast<void*>(to), from, bytes); }
constexpr const char* NO_SUM = "no sum of this type, or no live communicator";
bool adds(int type, int sum) { return sum == SUM && size_of(type) > 1; }

/// Sends and receives since ncclGroupStart, which ncclGroupEnd enqueues together.
struct Group {
    bool open = false;
    const void* of = nullptr;
    Blocks from, to;
    void* stream = nullptr;
};
thread_local Group group;

int part(const char* name, Blocks Group::*which, Block block, int type, const void* of, void* stream) {
    const Shared found = find(of);
    if (const char* why = busy(found)) return refused(INVALID_USAGE, name, why);
    const bool one = group.of == nullptr || (group.of == of && group.stream == stream);
    if (!group.open || !one) return refused(INVALID_USAGE, name, "not in a group for this communicator and stream");
    if (block.peer >= found->size || size_of(type) == 0) return refused(INVALID_ARGUMENT, name, "no such peer or type");
    block.bytes *= size_of(type);
    (group.*which).push_back(block);
    group.of = of, group.stream = stream;
    return found->blocking ? SUCCESS : IN_PROGRESS;
}

/// Makes a communicator, and begins to join the other ranks.
int join(const char* name, const void** to, int size, const Id& id, int rank, bool blocking) {
    const bool exists = rank >= 0 && rank < size && static_cast<u64>(size) <= MOST_RANKS && id.process > 0;
    if (!exists) return refused(INVALID_ARGUMENT, name, "no such rank, or no id");
    const auto place = "/proc/" + std::to_string(id.process) + "/fd/" + std::to_string(id.file);
    const int file = open(place.c_str(), O_RDWR | O_CLOEXEC);
    const u64 bytes = static_cast<u64>(size) * sizeof(Seat);
    void* seats = file < 0 ? MAP_FAILED : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (seats == MAP_FAILED) return refused(SYSTEM_ERROR, name, "the id's process has ended");
    const auto of = std::make_shared<Communicator>(seats, size, rank, current(), blocking);
    {
        static u64 count = 0;
        std::lock_guard guard(lock);
        *to = reinterpret_cast<const void*>(++count);
        live[*to] = of;
    }
    const auto joins = Clock::now() + std::chrono::milliseconds(setting("FAKE_RCCL_JOINS", of->rank, 0));
    const int state = begin(*of, [=, of = of.get()] {
        Seat& seat = of->seat();
        if (Clock::now() >= joins && seat.state == ABSENT) seat.process = getpid(), seat.state = JOINED;
        return of->all_are(JOINED);
    });
    const auto call = name + std::string(" ") + std::to_string(rank) + " on " + std::to_string(of->device);
    outcome(state == IN_PROGRESS ? SUCCESS : state, call);
    return state;
}

/// Removes a communicator from those that are live.
void forget(const void* handle) {
    std::lock_guard guard(lock);
    live.erase(handle);
}

} // namespace

extern "C" {

int ncclGetVersion(int* version) {
    *version = 22707;
    return SUCCESS;
}
const char* ncclGetErrorString(int code) {
    switch (code) {
    case SUCCESS: return "no error";
    case SYSTEM_ERROR: return "unhandled system error";
    case INVALID_ARGUMENT: return "invalid argument";
    case INVALID_USAGE: return "invalid usage";
    case REMOTE_ERROR: return "remote process exited or there was a network error";
    default: return "unknown result code";
    }
}
const char* ncclGetLastError(const void*) { return last.c_str(); }
int ncclGetUniqueId(Id* id) {
    const char* kept = std::getenv("HSA_NO_SCRATCH_RECLAIM");
    if (std::getenv("FAKE_RCCL_REFUSES") != nullptr && (kept == nullptr || std::strcmp(kept, "1") != 0)) {
        return refused(SYSTEM_ERROR, "ncclGetUniqueId", "scratch memory is reclaimed");
    }
    std::memset(id, 0, sizeof *id);
    id->process = getpid(), id->file = memfd_create("fake of a communicator", MFD_CLOEXEC);
    const bool made = id->file >= 0 && ftruncate(id->file, MOST_RANKS * sizeof(Seat)) == 0;
    return made ? SUCCESS : refused(SYSTEM_ERROR, "ncclGetUniqueId", "no file in memory");
}
int ncclCommInitRankConfig(const void** to, int size, Id id, int rank, const Config* config) {
    const bool known = config->size >= sizeof(Config) && config->magic == 0xcafebeef && config->version >= 21800;
    const bool good = known && (config->blocking == 0 || config->blocking == 1) &&
                      (config->most_blocks > 0 || config->most_blocks == UNSET);
    if (!good) return refused(INVALID_ARGUMENT, "ncclCommInitRankConfig", "no configuration of 2.18 or later");
    return join("ncclCommInitRankConfig", to, size, id, rank, config->blocking == 1);
}
int ncclCommGetAsyncError(const void* handle, int* state) {
    const Shared of = find(handle);
    if (of == nullptr) return refused(INVALID_ARGUMENT, "ncclCommGetAsyncError", "no live communicator");
    *state = state_of(*of);
    return SUCCESS;
}
int ncclCommFinalize(const void* handle) {
    const Shared of = find(handle);
    if (const char* why = busy(of)) return refused(INVALID_USAGE, "ncclCommFinalize", why);
    of->closed = true;
    return begin(*of, [of = of.get()] {
        if (of->queued == 0 && of->seat().state == JOINED) of->seat().state = LEAVING;
        of->look_for_lost(~0ull);
        return of->all_are(LEAVING) && (outcome(SUCCESS, "ncclCommFinalize"), true);
    });
}
/// Waits for ever if FAKE_RCCL_GRAPHS is set for the rank: the library waits for the graphs that
/// captured collectives, and the program keeps one.
static void wait_for_graphs(u64 rank) {
    while (setting("FAKE_RCCL_GRAPHS", rank, 0) != 0) std::this_thread::sleep_for(std::chrono::seconds(1));
}
int ncclCommDestroy(const void* handle) {
    const Shared of = find(handle);
    if (of == nullptr) return refused(INVALID_ARGUMENT, "ncclCommDestroy", "no live communicator");
    if (!of->blocking && of->seat().state != LEAVING) {
        return refused(INVALID_USAGE, "ncclCommDestroy", "the communicator is not finalized");
    }
    forget(handle);
    wait_for_graphs(of->rank);
    return outcome(SUCCESS, "ncclCommDestroy");
}
int ncclCommAbort(const void* handle) {
    const Shared of = find(handle);
    if (of == nullptr) return refused(INVALID_ARGUMENT, "ncclCommAbort", "no live communicator");
    of->aborted = true;
    of->seat().state = GONE;
    std::unique_lock guard(of->own);
    of->progress = nullptr;
    guard.unlock();
    // Waits for the collective that runs, which may still write its output.
    std::unique_lock(of->running).unlock();
    forget(handle);
    wait_for_graphs(of->rank);
    return outcome(SUCCESS, "ncclCommAbort");
}

int ncclCommWindowRegister(const void* handle, u64 memory, u64 bytes, const void** window, int flags) {
    const Shared of = find(handle);
    if (const char* why = busy(of)) return refused(INVALID_USAGE, "ncclCommWindowRegister", why);
    const bool good = current() == of->device && flags == 1 &&
                      runtime<bool (*)(int, u64, u64)>("standin_reaches")(of->device, memory, bytes);
    if (!good) return refused(INVALID_ARGUMENT, "ncclCommWindowRegister", "memory that the device cannot access");
    *window = handle;
    return outcome(SUCCESS, "ncclCommWindowRegister");
}
int ncclCommWindowDeregister(const void* handle, const void* window) {
    const bool good = find(handle) != nullptr && window == handle;
    return outcome(good ? SUCCESS : INVALID_ARGUMENT, "ncclCommWindowDeregister");
}

int ncclAllReduce(u64 from, u64 to, u64 count, int type, int sum, const void* of, void* stream) {
    const Shared found = find(of);
    if (found == nullptr || !adds(type, sum)) return refused(INVALID_ARGUMENT, "ncclAllReduce", NO_SUM);
    const u64 bytes = count * size_of(type), size = found->size;
    const Call call = {1, count, static_cast<u64>(type), 0};
    return collective("ncclAllReduce", of, call, {{from, bytes}}, {{to, bytes}}, stream, [=](const Seat* seats) {
        for (u64 at = 0; at < count; ++at) add(type, seats, size, at, to, at);
        return true;
    });
}
int ncclReduceScatter(u64 from, u64 to, u64 count, int type, int sum, const void* of, void* stream) {
    const Shared found = find(of);
    if (found == nullptr || !adds(type, sum)) return refused(INVALID_ARGUMENT, "ncclReduceScatter", NO_SUM);
    const u64 bytes = count * size_of(type), size = found->size, first = found->rank * count;
    const Call call = {2, count, static_cast<u64>(type), 0};
    const auto finish = [=](const Seat* seats) {
        for (u64 at = 0; at < count; ++at) add(type, seats, size, first + at, to, at);
        return true;
    };
    return collective("ncclReduceScatter", of, call, {{from, bytes * size}}, {{to, bytes}}, stream, finish);
}
int ncclAllGather(u64 from, u64 to, u64 count, int type, const void* of, void* stream) {
    const Shared found = find(of);
    if (found == nullptr) return refused(INVALID_ARGUMENT, "ncclAllGather", "no live communicator");
    const u64 bytes = count * size_of(type), size = found->size;
    const Call call = {3, count, static_cast<u64>(type), 0};
    return collective("ncclAllGather", of, call, {{from, bytes}}, {{to, bytes * size}}, stream, [=](const Seat* seats) {
        for (u64 rank = 0; rank < size; ++rank) copy(to + rank * bytes, seats[rank].data, bytes);
        return true;
    });
}
int ncclBroadcast(u64 from, u64 to, u64 count, int type, int root, const void* of, void* stream) {
    const Shared found = find(of);
    const bool good = found != nullptr && root >= 0 && static_cast<u64>(root) < found->size;
    if (!good) return refused(INVALID_ARGUMENT, "ncclBroadcast", "no such root, or no live communicator");
    const u64 bytes = count * size_of(type);
    const Call call = {4, count, static_cast<u64>(type), static_cast<u64>(root)};
    return collective("ncclBroadcast", of, call, {{from, bytes}}, {{to, bytes}}, stream, [=](const Seat* seats) {
        copy(to, seats[root].data, bytes);
        return true;
    });
}
int ncclGroupStart() {
    if (group.open) return refused(INVALID_USAGE, "ncclGroupStart", "a group in a group");
    group = Group{};
    group.open = true;
    return SUCCESS;
}
int ncclSend(u64 from, u64 count, int type, int peer, const void* of, void* stream) {
    return part("ncclSend", &Group::from, {from, count, static_cast<u64>(peer)}, type, of, stream);
}
int ncclRecv(u64 to, u64 count, int type, int peer, const void* of, void* stream) {
    return part("ncclRecv", &Group::to, {to, count, static_cast<u64>(peer)}, type, of, stream);
}
int ncclGroupEnd() {
    const Group all = std::exchange(group, Group{});
    const Shared found = find(all.of);
    if (!all.open || found == nullptr) return refused(INVALID_USAGE, "ncclGroupEnd", "no group with sends or receives");
    const auto finish = [to = all.to, rank = found->rank](const Seat* seats) {
        // A receive takes the next message that its peer sends to this rank.
        std::map<u64, u64> taken;
        for (const Block& one : to) {
            const Seat& peer = seats[one.peer];
            const Part* part = peer.part(rank, taken[one.peer]++);
            if (part == nullptr || part->bytes != one.bytes) return false;
            copy(one.address, peer.data + part->at, part->bytes);
        }
        return true;
    };
    return collective("ncclGroupEnd", all.of, {5, 0, 0, 0}, all.from, all.to, all.stream, finish);
}
}
