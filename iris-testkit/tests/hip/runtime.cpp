// Fake of HIP and hiprtc that runs on the host, for tests of the backend without a device. Device
// memory is a file in memory, a stream is a thread, and a kernel is the device source compiled as
// host code by g++ with the hooks of iris-kernels/tests/host. The fake is stricter than AMD's
// runtime: the stream's device must be current, memory is freed exactly once by the matching
// function, and flags unknown to the release are refused. Passing tests on the fake say nothing
// about a real device.
//
// This file is long because it is one library with many functions, which HIP names.
//
// FAKE_RELEASE is the release of HIP, 5 or 7. Environment variables: FAKE_HIP_DEVICES (2),
// FAKE_HIP_UNITS (8, compute units of a device), FAKE_HIP_LOG (file to which calls are logged),
// FAKE_HIP_NO_MASKS (streams get no hardware queue of their own), FAKE_HIP_HOOKS (folder of
// launch.h), FAKE_HIP_CODE (folder in which processes share compiled programs), FAKE_HIP_DELAY (0;
// milliseconds before each kernel), FAKE_HIP_NO_PEERS (devices without access to others' memory).
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "errors.h"

#ifndef FAKE_RELEASE
#define FAKE_RELEASE 7
#endif

namespace {

using u32 = unsigned;
using u64 = unsigned long long;
using namespace drivers;
constexpr u32 DEVICE_MEMORY = FAKE_RELEASE < 6 ? 1 : 2, LAZY_PEER = FAKE_RELEASE < 6 ? 0 : 1;

std::string setting(const char* name, const char* otherwise) {
    const char* value = std::getenv(name);
    return value != nullptr && *value != 0 ? value : otherwise;
}
int devices() { return std::stoi(setting("FAKE_HIP_DEVICES", "2")); }
/// Whether kernels of `device` can access memory of `peer`. FAKE_HIP_NO_PEERS denies it: for all
/// pairs of devices ("all"), or for pairs like "0-2,1-2", where device 0 cannot access memory of
/// device 2.
bool can_access(int device, int peer) {
    const std::string denied = setting("FAKE_HIP_NO_PEERS", "");
    const std::string pair = std::to_string(device) + "-" + std::to_string(peer);
    return device == peer || (denied != "all" && ("," + denied + ",").find("," + pair + ",") == std::string::npos);
}
int units() { return std::stoi(setting("FAKE_HIP_UNITS", "8")); }

// State of the runtime is never destroyed, because threads of the program and of this library may
// still use it while the process ends.
std::mutex lock;
thread_local int current = 0;
thread_local u32 capture_mode = 0;

void note(const std::string& line) {
    static const std::string& file = *new std::string(setting("FAKE_HIP_LOG", ""));
    if (file.empty()) return;
    std::ofstream(file, std::ios::app) << line + "\n";
}
template <class... Parts> Error outcome(Error code, const char* call, Parts... parts) {
    std::ostringstream line;
    line << call;
    ((line << ' ' << parts), ...);
    line << " on " << current << " = " << code;
    note(line.str());
    return code;
}

struct Memory {
    u64 bytes;
    int device, file;
    bool opened;
};
auto& memory = *new std::map<u64, Memory>;
auto& peers = *new std::set<std::pair<int, int>>;

/// Finds the allocation that contains all `bytes` bytes at `address`; null if none does.
const Memory* of(u64 address, u64 bytes) {
    auto next = memory.upper_bound(address);
    if (next == memory.begin()) return nullptr;
    const auto& [base, found] = *--next;
    return address + bytes <= base + found.bytes ? &found : nullptr;
}
bool reaches(int device, u64 address, u64 bytes) {
    std::lock_guard guard(lock);
    const Memory* found = of(address, bytes);
    return found != nullptr && (found->opened || found->device == device || peers.count({device, found->device}));
}

/// Device that allocated the memory at `address`, or that opened this memory by a handle.
int owner_of(u64 address) {
    std::lock_guard guard(lock);
    const Memory* found = of(address, 1);
    return found == nullptr ? -1 : found->device;
}

u64 map(int file, u64 bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return at == MAP_FAILED ? 0 : reinterpret_cast<u64>(at);
}

struct Stream {
    explicit Stream(int device) : device(device), worker([this] { work(); }) {}
    ~Stream() {
        enqueue({});
        worker.join();
    }
    void enqueue(std::function<void()> item) {
        std::lock_guard guard(own);
        items.push_back(std::move(item));
        changed.notify_all();
    }
    bool idle() {
        std::lock_guard guard(own);
        return items.empty();
    }
    void wait() {
        std::unique_lock guard(own);
        changed.wait(guard, [this] { return items.empty(); });
    }
    int device;

  private:
    void work() {
        for (;;) {
            std::function<void()> item;
            {
                std::unique_lock guard(own);
                changed.wait(guard, [this] { return !items.empty(); });
                item = items.front();
            }
            if (!item) return;
            item();
            std::lock_guard guard(own);
            items.pop_front();
            changed.notify_all();
        }
    }
    std::mutex own;
    std::condition_variable changed;
    std::deque<std::function<void()>> items;
    std::thread worker;
};

/// Recording of an event on a stream. A wait for the event waits for the recording that was the
/// latest when the wait was enqueued.
struct Mark {
    std::mutex own;
    std::condition_variable changed;
    bool over = false;
    void reach() {
        std::lock_guard guard(own);
        over = true;
        changed.notify_all();
    }
    void wait() {
        std::unique_lock guard(own);
        changed.wait(guard, [this] { return over; });
    }
    bool is_over() {
        std::lock_guard guard(own);
        return over;
    }
};
struct Event {
    std::shared_ptr<Mark> last;
};

auto& streams = *new std::set<Stream*>;
auto& events = *new std::set<Event*>;
bool known(Stream* stream) {
    std::lock_guard guard(lock);
    return streams.count(stream) != 0;
}
std::shared_ptr<Mark> last_of(Event* event) {
    std::lock_guard guard(lock);
    return events.count(event) ? event->last : nullptr;
}
/// Whether work may be enqueued on `stream`: the stream's device must be the current one.
Error ready(Stream* stream) {
    if (!known(stream)) return INVALID_HANDLE;
    return stream->device == current ? SUCCESS : INVALID_DEVICE;
}

/// Returns a new function that launches a kernel with a copy of the arguments at `args`.
using Bind = std::function<void()>* (*)(void** args, u32 groups);
struct Module {
    void* library;
    int device;
};
struct Function {
    Module* module;
    std::string name;
    Bind bind;
};

std::string content(const std::string& file) {
    std::ostringstream text;
    text << std::ifstream(file, std::ios::binary).rdbuf();
    return text.str();
}

/// Prefix of the name under which a compiled source exports the `Bind` of a kernel.
constexpr const char* BIND = "iris_host_bind_";

struct Program {
    std::string text, log, code;
    std::map<std::string, std::string> headers;
};

} // namespace

#include "devices.h"

extern "C" {

Error hipRuntimeGetVersion(int* version) {
    *version = FAKE_RELEASE < 6 ? 50422804 : 70253211;
    return SUCCESS;
}
Error hipDeviceGetName(char* name, int length, int) {
    std::snprintf(name, length, "a fake of HIP");
    return SUCCESS;
}
Error hipDeviceGetAttribute(int* value, u32 attribute, int) {
    switch (attribute) {
    case 63: *value = units(); return SUCCESS;
    case 74: *value = 64 << 10; return SUCCESS;
    case 87: *value = std::stoi(setting("FAKE_HIP_WAVE", "64")); return SUCCESS;
    case 10017:
        *value = 100000;
        return FAKE_RELEASE < 6 ? INVALID_VALUE : SUCCESS;
    default: return outcome(INVALID_VALUE, "hipDeviceGetAttribute", attribute);
    }
}
static const char* ARCH = FAKE_RELEASE < 6 ? "gfx90a" : "gfx942";
Error hipGetDeviceProperties(char* to, int) { return properties(to, 792, 396, ARCH); }
#if FAKE_RELEASE >= 6
Error hipGetDevicePropertiesR0600(char* to, int) { return properties(to, 1472, 1160, ARCH); }
Error hipStreamGetDevice(Stream* stream, int* device) {
    if (!known(stream)) return INVALID_HANDLE;
    *device = stream->device;
    return SUCCESS;
}
#endif
Error hipDeviceCanAccessPeer(int* can, int device, int peer) {
    *can = device != peer && can_access(device, peer);
    return SUCCESS;
}
Error hipDeviceEnablePeerAccess(int peer, u32 flags) {
    std::lock_guard guard(lock);
    if (flags != 0 || peer == current || !can_access(current, peer)) return INVALID_DEVICE;
    const Error code = peers.insert({current, peer}).second ? SUCCESS : ALREADY_ENABLED;
    return outcome(code, "hipDeviceEnablePeerAccess", peer);
}
Error hipThreadExchangeStreamCaptureMode(u32* mode) {
    if (*mode > 2) return INVALID_VALUE;
    std::swap(capture_mode, *mode);
    return SUCCESS;
}

static Error create(Stream** stream) {
    std::lock_guard guard(lock);
    streams.insert(*stream = new Stream(current));
    return SUCCESS;
}
Error hipExtStreamCreateWithCUMask(Stream** stream, u32 words, const u32* mask) {
    const bool all = words == 1 && *mask == (1u << units()) - 1;
    if (!all || !setting("FAKE_HIP_NO_MASKS", "").empty()) {
        return outcome(INVALID_VALUE, "hipExtStreamCreateWithCUMask", words);
    }
    return outcome(create(stream), "hipExtStreamCreateWithCUMask", words);
}
Error hipStreamCreateWithFlags(Stream** stream, u32 flags) {
    return outcome(create(stream), "hipStreamCreateWithFlags", flags);
}
Error hipStreamDestroy(Stream* stream) {
    {
        std::lock_guard guard(lock);
        if (streams.erase(stream) == 0) return INVALID_HANDLE;
    }
    stream->wait();
    delete stream;
    return outcome(SUCCESS, "hipStreamDestroy");
}
Error hipStreamSynchronize(Stream* stream) {
    if (!known(stream)) return INVALID_HANDLE;
    stream->wait();
    return SUCCESS;
}
Error hipStreamQuery(Stream* stream) {
    if (!known(stream)) return INVALID_HANDLE;
    return stream->idle() ? SUCCESS : NOT_READY;
}
Error hipStreamWaitEvent(Stream* stream, Event* event, u32 flags) {
    const Error code = ready(stream);
    if (code != SUCCESS || flags != 0) return outcome(code, "hipStreamWaitEvent");
    if (const auto mark = last_of(event)) stream->enqueue([mark] { mark->wait(); });
    return outcome(code, "hipStreamWaitEvent");
}
Error hipStreamGetCaptureInfo_v2(Stream* stream, u32* status, u64* id, void*, void*, void*) {
    if (!known(stream)) return INVALID_HANDLE;
    *status = 0, *id = 0;
    return SUCCESS;
}
Error hipLaunchHostFunc(Stream* stream, void (*call)(void*), void* data) {
    const Error code = ready(stream);
    if (code != SUCCESS) return outcome(code, "hipLaunchHostFunc");
    stream->enqueue([=] { call(data); });
    return SUCCESS;
}
/// Whether a device can access all `bytes` bytes at `address`; the fakes of other libraries call
/// this.
bool fake_reaches(int device, u64 address, u64 bytes) { return reaches(device, address, bytes); }
Error hipEventCreateWithFlags(Event** event, u32 flags) {
    // Expected flags of an event: no timing, and a release at system scope for each record.
    if (flags != (2 | 0x80000000u)) return outcome(INVALID_VALUE, "hipEventCreateWithFlags", flags);
    std::lock_guard guard(lock);
    events.insert(*event = new Event);
    return SUCCESS;
}
Error hipEventRecord(Event* event, Stream* stream) {
    const Error code = ready(stream);
    if (code != SUCCESS) return outcome(code, "hipEventRecord");
    const auto mark = std::make_shared<Mark>();
    {
        std::lock_guard guard(lock);
        if (events.count(event) == 0) return INVALID_HANDLE;
        event->last = mark;
    }
    stream->enqueue([mark] { mark->reach(); });
    return outcome(SUCCESS, "hipEventRecord", "on stream", stream);
}
Error hipEventQuery(Event* event) {
    const auto mark = last_of(event);
    return mark == nullptr || mark->is_over() ? SUCCESS : NOT_READY;
}
Error hipEventSynchronize(Event* event) {
    if (const auto mark = last_of(event)) mark->wait();
    return SUCCESS;
}
Error hipEventDestroy(Event* event) {
    std::lock_guard guard(lock);
    if (events.erase(event) == 0) return INVALID_HANDLE;
    delete event;
    return SUCCESS;
}

static Error copy(const char* call, u64 to, bool device_to, u64 from, bool device_from, u64 bytes, Stream* stream) {
    const Error code = ready(stream);
    if (code != SUCCESS) return outcome(code, call, bytes);
    if ((device_to && !reaches(stream->device, to, bytes)) || (device_from && !reaches(stream->device, from, bytes))) {
        return outcome(ILLEGAL_ADDRESS, call, bytes);
    }
    // A copy between host and device is refused unless the stream is of the device that owns the
    // memory: AMD's runtime would copy on the null stream of the owning device, after all work of
    // that device.
    const int owner = owner_of(device_to ? to : from);
    if (device_to != device_from && owner != stream->device) return outcome(INVALID_DEVICE, call, bytes, "of", owner);
    stream->enqueue([=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
    // Large copies from or to pageable memory are refused, because AMD's runtime was seen to hang
    // in them.
    const bool pageable = !device_to || !device_from;
    return pageable && bytes > 64 << 10 ? outcome(INVALID_VALUE, call, bytes) : SUCCESS;
}
Error hipMemcpyAsync(u64 to, u64 from, u64 bytes, u32 kind, Stream* stream) {
    if (kind != 4) return outcome(INVALID_VALUE, "hipMemcpyAsync", kind);
    const Error code = copy("hipMemcpyAsync", to, true, from, true, bytes, stream);
    return code == SUCCESS ? outcome(code, "hipMemcpyAsync", bytes, "on stream", stream) : code;
}
Error hipMemcpy2DAsync(u64 to, u64 to_apart, u64 from, u64 from_apart, u64 bytes, u64 lines, u32 kind, Stream* stream) {
    if (kind != 4 || to_apart < bytes || from_apart < bytes) return outcome(INVALID_VALUE, "hipMemcpy2DAsync", kind);
    for (u64 line = 0; line < lines; ++line) {
        const u64 there = to + line * to_apart, here = from + line * from_apart;
        const Error code = copy("hipMemcpy2DAsync", there, true, here, true, bytes, stream);
        if (code != SUCCESS) return code;
    }
    return outcome(SUCCESS, "hipMemcpy2DAsync", bytes * lines, "on stream", stream);
}
Error hipMemcpyHtoDAsync(u64 to, u64 from, u64 bytes, Stream* stream) {
    return copy("hipMemcpyHtoDAsync", to, true, from, false, bytes, stream);
}
Error hipMemcpyDtoHAsync(u64 to, u64 from, u64 bytes, Stream* stream) {
    return copy("hipMemcpyDtoHAsync", to, false, from, true, bytes, stream);
}
Error hipMemsetAsync(u64, int, u64 bytes, Stream*) { return outcome(INVALID_VALUE, "hipMemsetAsync", bytes); }
Error hipMemGetInfo(u64* free, u64* total) {
    *free = *total = 1ull << 30;
    return SUCCESS;
}

static Error take(const char* call, u64* address, u64 bytes, u32 flags) {
    const int file = memfd_create("fake of a device", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return OUT_OF_MEMORY;
    *address = map(file, bytes);
    if (*address == 0) return OUT_OF_MEMORY;
    // New memory has undefined content, so it is filled with a pattern that tests would notice.
    std::memset(reinterpret_cast<void*>(*address), 0xa5, bytes);
    std::lock_guard guard(lock);
    memory[*address] = {bytes, current, file, false};
    return outcome(SUCCESS, call, bytes, "flags", flags);
}
Error hipMalloc(u64* address, u64 bytes) { return take("hipMalloc", address, bytes, 0); }
Error hipExtMallocWithFlags(u64* address, u64 bytes, u32 flags) {
    const bool known = flags == 1 || (flags == 3 && FAKE_RELEASE >= 6);
    return known ? take("hipExtMallocWithFlags", address, bytes, flags)
                 : outcome(INVALID_VALUE, "hipExtMallocWithFlags", bytes, "flags", flags);
}
static Error give(const char* call, u64 address, bool opened) {
    std::lock_guard guard(lock);
    const auto found = memory.find(address);
    if (found == memory.end() || found->second.opened != opened) return outcome(INVALID_VALUE, call);
    munmap(reinterpret_cast<void*>(address), found->second.bytes);
    close(found->second.file);
    memory.erase(found);
    return outcome(SUCCESS, call);
}
Error hipFree(u64 address) { return give("hipFree", address, false); }
Error hipHostMalloc(void** memory, u64 bytes, u32 flags) {
    if (flags != (1u | 2u | 0x40000000u)) return outcome(INVALID_VALUE, "hipHostMalloc", flags);
    *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return SUCCESS;
}
Error hipHostGetDevicePointer(u64* address, void* host, u32 flags) {
    *address = reinterpret_cast<u64>(host);
    return flags == 0 ? SUCCESS : INVALID_VALUE;
}
Error hipMemGetAddressRange(u64* base, u64* bytes, u64 address) {
    std::lock_guard guard(lock);
    auto next = memory.upper_bound(address);
    if (next == memory.begin()) return NOT_FOUND;
    --next;
    *base = next->first, *bytes = next->second.bytes;
    return SUCCESS;
}
Error hipPointerGetAttribute(void* data, u32 attribute, u64 address) {
    std::lock_guard guard(lock);
    const Memory* found = of(address, 1);
    if (found == nullptr) return INVALID_VALUE;
    if (attribute != 2 && attribute != 9) return outcome(INVALID_VALUE, "hipPointerGetAttribute", attribute);
    *static_cast<int*>(data) = attribute == 2 ? static_cast<int>(DEVICE_MEMORY) : found->device;
    return SUCCESS;
}

struct Handle {
    u64 bytes;
    int process, file, device;
    char rest[44];
};
static_assert(sizeof(Handle) == 64, "as HIP's");
Error hipIpcGetMemHandle(Handle* handle, u64 address) {
    std::lock_guard guard(lock);
    const auto found = memory.find(address);
    if (found == memory.end() || found->second.opened) return outcome(INVALID_VALUE, "hipIpcGetMemHandle");
    *handle = {found->second.bytes, getpid(), found->second.file, found->second.device, {}};
    return outcome(SUCCESS, "hipIpcGetMemHandle");
}
Error hipIpcOpenMemHandle(u64* address, Handle handle, u32 flags) {
    // Like AMD's runtime, accepts only the flag LAZY_PEER, and refuses a handle in the process that
    // owns its memory.
    if (flags != LAZY_PEER || handle.process == getpid()) return outcome(INVALID_VALUE, "hipIpcOpenMemHandle", flags);
    if (!can_access(current, handle.device)) return outcome(INVALID_DEVICE, "hipIpcOpenMemHandle", handle.device);
    const auto place = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
    FILE* opened = std::fopen(place.c_str(), "r+");
    if (opened == nullptr) return outcome(INVALID_VALUE, "hipIpcOpenMemHandle", place);
    const int file = dup(fileno(opened));
    std::fclose(opened);
    *address = map(file, handle.bytes);
    std::lock_guard guard(lock);
    memory[*address] = {handle.bytes, current, file, true};
    return outcome(SUCCESS, "hipIpcOpenMemHandle", flags);
}
Error hipIpcCloseMemHandle(u64 address) { return give("hipIpcCloseMemHandle", address, true); }

Error hipModuleLoadData(Module** module, const unsigned char* image) {
    // Size of the ELF file, computed from its header: g++ writes the section table last.
    u64 sections;
    std::memcpy(&sections, image + 40, 8);
    const u64 bytes = sections + u64{image[58]} * (image[60] + 256u * image[61]);
    const int file = memfd_create("module", 0);
    if (write(file, image, bytes) != static_cast<ssize_t>(bytes)) return INVALID_IMAGE;
    void* library = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return outcome(INVALID_IMAGE, "hipModuleLoadData", dlerror());
    *module = new Module{library, current};
    return outcome(SUCCESS, "hipModuleLoadData", bytes);
}
Error hipModuleGetFunction(Function** function, Module* module, const char* name) {
    const auto bind = reinterpret_cast<Bind>(dlsym(module->library, (BIND + std::string(name)).c_str()));
    if (bind == nullptr) return NOT_FOUND;
    *function = new Function{module, name, bind};
    return SUCCESS;
}
Error hipFuncGetAttribute(int* value, u32 attribute, Function*) {
    *value = 64;
    return attribute == 3 || attribute == 4 ? SUCCESS : INVALID_VALUE;
}
Error hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* each, Function*, int, u64) {
    *each = 1;
    return SUCCESS;
}
Error hipModuleLaunchKernel(Function* function, u32 groups, u32 gy, u32 gz, u32 threads, u32 ty, u32 tz, u32 shared,
                            Stream* stream, void** parameters, void** extra) {
    const Error code = ready(stream);
    const bool odd = gy * gz * ty * tz != 1 || threads == 0 || threads > 1024 || shared > 64 << 10 || extra != nullptr;
    if (code != SUCCESS || odd || function->module->device != stream->device) {
        return outcome(code != SUCCESS ? code : INVALID_VALUE, "hipModuleLaunchKernel", function->name);
    }
    // The caller may reuse the parameters after the launch returns, so they are copied here.
    const std::shared_ptr<std::function<void()>> work(function->bind(parameters, groups));
    const std::chrono::milliseconds late(std::stoi(setting("FAKE_HIP_DELAY", "0")));
    stream->enqueue([=] {
        std::this_thread::sleep_for(late);
        (*work)();
    });
    return outcome(SUCCESS, "hipModuleLaunchKernel", function->name, groups);
}

int hiprtcVersion(int* major, int* minor) {
    *major = 9, *minor = 0;
    return 0;
}
const char* hiprtcGetErrorString(int code) { return code == 0 ? "HIPRTC_SUCCESS" : "HIPRTC_ERROR_COMPILATION"; }
int hiprtcCreateProgram(Program** program, const char* text, const char*, int count, const char** texts,
                        const char** names) {
    *program = new Program{text, "", "", {}};
    for (int i = 0; i < count; ++i) (*program)->headers[names[i]] = texts[i];
    return 0;
}
int hiprtcDestroyProgram(Program** program) {
    delete *program;
    *program = nullptr;
    return 0;
}
/// Compiles a program by g++, with the options `defines`; returns whether it succeeded.
static bool compiled(Program& program, const std::string& defines) {
    char folder[] = "/tmp/fake-hiprtc-XXXXXX";
    if (mkdtemp(folder) == nullptr) return false;
    const std::string at = folder, hooks = setting("FAKE_HIP_HOOKS", ".");
    for (const auto& [name, text] : program.headers) {
        std::filesystem::create_directories(std::filesystem::path(at + "/" + name).parent_path());
        std::ofstream(at + "/" + name) << text;
    }
    std::ofstream source(at + "/source.cpp");
    source << program.text << "\n#include \"" << hooks << "/launch.h\"\n";
    static const std::regex kernel("IRIS_KERNEL\\s+(\\w+)\\(");
    for (std::sregex_iterator it(program.text.begin(), program.text.end(), kernel), end; it != end; ++it) {
        source << "extern \"C\" std::function<void()>* " << BIND << (*it)[1] << "(void** args, u32 groups) {\n"
               << "    return new std::function<void()>(bound(" << (*it)[1] << ", args, groups));\n}\n";
    }
    source.close();
    // A workgroup has two threads, and each is a host thread.
    const std::string command = "g++ -std=c++20 -O1 -w -fPIC -fexceptions -pthread -shared -I" + at + defines +
                                " -DIRIS_THREADS=2 -o " + at + "/code.so " + at + "/source.cpp 2> " + at + "/log";
    const int status = std::system(command.c_str());
    program.log = content(at + "/log"), program.code = content(at + "/code.so");
    std::filesystem::remove_all(at);
    return status == 0;
}
int hiprtcCompileProgram(Program* program, int count, const char** options) {
    std::string defines;
    for (int i = 0; i < count; ++i) {
        if (std::strncmp(options[i], "-D", 2) == 0) defines += std::string(" ") + options[i];
    }
    const std::string shared = setting("FAKE_HIP_CODE", "");
    if (shared.empty()) return compiled(*program, defines) ? 0 : 6;
    // Ranks need the same programs at the same time: one compiles, and the others wait for its file.
    std::string all = program->text + defines;
    for (const auto& [name, text] : program->headers) all += name + text;
    const auto file = shared + "/" + std::to_string(std::hash<std::string>{}(all));
    // The lock is a file of its own, because the renaming below replaces the file.
    const int held = open((file + ".lock").c_str(), O_CREAT | O_RDONLY | O_CLOEXEC, 0600);
    flock(held, LOCK_EX);
    program->code = content(file);
    if (program->code.empty() && compiled(*program, defines)) {
        // The file is renamed when it is complete, because this process may be killed at any time.
        std::ofstream(file + ".new", std::ios::binary) << program->code;
        std::rename((file + ".new").c_str(), file.c_str());
    }
    close(held);
    return program->code.empty() ? 6 : 0;
}
int hiprtcGetProgramLogSize(Program* program, u64* bytes) {
    *bytes = program->log.size() + 1;
    return 0;
}
int hiprtcGetProgramLog(Program* program, char* to) {
    std::memcpy(to, program->log.c_str(), program->log.size() + 1);
    return 0;
}
int hiprtcGetCodeSize(Program* program, u64* bytes) {
    *bytes = program->code.size();
    return 0;
}
int hiprtcGetCode(Program* program, char* to) {
    std::memcpy(to, program->code.data(), program->code.size());
    return 0;
}
}
