// Stand-in for the CUDA driver, built on driver.h, which it shares with the stand-in for HIP
// (hip.cpp).
#include "driver.h"

namespace {

struct Context {
    int device;
};
Context contexts[64];
thread_local std::vector<Context*> stack;

Error push(Context* context) {
    stack.push_back(context);
    current = context->device;
    return SUCCESS;
}

struct Physical {
    u64 bytes;
    int device, file;
};
struct Location {
    u32 kind;
    int id;
};
struct Properties {
    u32 kind, handles;
    Location location;
    void* meta;
    unsigned char flags[8];
};
struct Access {
    Location location;
    u32 flags;
};
struct Configuration {
    u32 groups[3], threads[3], shared, reserved;
    Stream* stream;
    const struct Attribute* attributes;
    u64 attribute_count;
};
struct Attribute {
    u32 id, reserved;
    u64 value[8];
};
struct Side {
    u64 x, y;
    u32 kind, reserved;
    u64 host;
    Address address;
    u64 array, apart;
};
struct Lines {
    Side from, to;
    u64 bytes, lines;
};

Error ranged(u64 address, u64 bytes, Memory** found) {
    const auto at = memory.find(address);
    if (at == memory.end() || at->second.bytes != bytes) return INVALID_VALUE;
    *found = &at->second;
    return SUCCESS;
}

} // namespace

extern "C" {

Error cuInit(u32 flags) { return flags == 0 ? devices() == 0 ? NO_DEVICE : SUCCESS : INVALID_VALUE; }
Error cuGetErrorName(Error code, const char** name) {
    *name = drivers::cuda_name(code);
    return *name == nullptr ? INVALID_VALUE : SUCCESS;
}
Error cuDriverGetVersion(int* version) {
    *version = 13000;
    return SUCCESS;
}
Error cuDeviceGetCount(int* count) {
    *count = devices();
    return SUCCESS;
}
Error cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < devices() ? SUCCESS : INVALID_DEVICE;
}
Error cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    std::memset(uuid, device, 16);
    return SUCCESS;
}
Error cuDeviceGetAttribute(int* value, u32 attribute, int) {
    static const int arch = std::stoi(setting("STANDIN_ARCH", "90"));
    switch (attribute) {
    case 16: *value = multiprocessors(); return SUCCESS;
    case 75: *value = arch / 10; return SUCCESS;
    case 76: *value = arch % 10; return SUCCESS;
    case 102: case 103: *value = setting("STANDIN_NO_VIRTUAL_MEMORY", "").empty(); return SUCCESS;
    default: return INVALID_VALUE;
    }
}
Error cuDevicePrimaryCtxRetain(Context** context, int device) {
    contexts[device].device = device;
    *context = &contexts[device];
    return SUCCESS;
}
Error cuCtxGetCurrent(Context** context) {
    *context = stack.empty() ? nullptr : stack.back();
    return SUCCESS;
}
Error cuCtxPushCurrent_v2(Context* context) { return push(context); }
Error cuCtxPopCurrent_v2(Context** context) {
    if (stack.empty()) return INVALID_CONTEXT;
    *context = stack.back();
    stack.pop_back();
    current = stack.empty() ? -1 : stack.back()->device;
    return SUCCESS;
}
Error cuCtxEnablePeerAccess(Context* context, u32 flags) { return enable_access(context->device, flags); }

Error cuStreamCreate(Stream** stream, u32 flags) {
    ENTER(StreamCreate);
    return flags == 1 ? create(stream) : INVALID_VALUE;
}
Error cuStreamGetCtx(Stream* stream, Context** context) {
    std::lock_guard guard(lock);
    if (streams.count(stream) == 0) return INVALID_HANDLE;
    *context = &contexts[stream->device];
    return SUCCESS;
}
Error cuGraphDestroy(u64) { return SUCCESS; }

Error cuEventCreate(Event** event, u32 flags) {
    ENTER(EventCreate);
    return flags == 2 ? create(event) : INVALID_VALUE;
}

Error cuMemcpyAsync(Address to, Address from, u64 bytes, Stream* stream) {
    return copy("cuMemcpyAsync", stream, {to, 0, false}, {from, 0, false}, bytes, 1);
}
Error cuMemcpy2DAsync_v2(const Lines* lines, Stream* stream) {
    const auto &from = lines->from, &to = lines->to;
    // Supported copies are those between addresses (kind 4) that start at column and row 0.
    if (from.kind != 4 || to.kind != 4 || (from.x | from.y | to.x | to.y) != 0) return INVALID_VALUE;
    return copy("cuMemcpy2DAsync", stream, {to.address, to.apart, false}, {from.address, from.apart, false}, lines->bytes,
                lines->lines);
}
Error cuMemsetD8Async(Address to, unsigned char value, u64 bytes, Stream* stream) {
    return fill("cuMemsetD8Async", stream, to, value, bytes);
}

Error cuMemGetInfo_v2(u64* free, u64* total) {
    *free = *total = 80ull << 30;
    return SUCCESS;
}
Error cuMemAlloc_v2(Address* address, u64 bytes) {
    ENTER(MemAlloc);
    host_waits("cuMemAlloc");
    std::lock_guard guard(lock);
    if (const Error code = check_apart()) return code;
    return current < 0 ? INVALID_CONTEXT : allocate(address, bytes, current);
}
Error cuDeviceGetDefaultMemPool(u64* pool, int device) {
    *pool = static_cast<u64>(device) + 1;
    return SUCCESS;
}
Error cuMemPoolSetAttribute(u64, u32, void*) { return SUCCESS; }
Error cuMemFree_v2(Address address) {
    host_waits("cuMemFree");
    return give(address, false);
}
Error cuMemHostAlloc(void** to, u64 bytes, u32 flags) {
    *to = flags == 3 ? std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096) : nullptr;
    return *to == nullptr ? INVALID_VALUE : SUCCESS;
}
Error cuMemHostGetDevicePointer_v2(Address* address, void* host, u32 flags) {
    *address = pin(host);
    return flags == 0 ? SUCCESS : INVALID_VALUE;
}
Error cuMemGetAllocationGranularity(u64* bytes, const Properties*, u32) {
    *bytes = 2 << 20;
    return SUCCESS;
}
Error cuMemCreate(Physical** handle, u64 bytes, const Properties* properties, u64 flags) {
    ENTER(MemCreate);
    host_waits("cuMemCreate");
    std::lock_guard guard(lock);
    if (const Error code = check_apart()) return code;
    const int file = file_of(bytes);
    if (flags != 0 || bytes % (2 << 20) != 0 || file < 0) return INVALID_VALUE;
    *handle = new Physical{bytes, properties->location.id, file};
    return SUCCESS;
}
Error cuMemRelease(Physical* handle) {
    close(handle->file);
    delete handle;
    return SUCCESS;
}
Error cuMemExportToShareableHandle(int* descriptor, Physical* handle, u32 kind, u64) {
    *descriptor = dup(handle->file);
    return kind == 1 && *descriptor >= 0 ? SUCCESS : INVALID_VALUE;
}
Error cuMemImportFromShareableHandle(Physical** handle, void* descriptor, u32 kind) {
    const int file = dup(static_cast<int>(reinterpret_cast<std::intptr_t>(descriptor)));
    const off_t bytes = lseek(file, 0, SEEK_END);
    if (kind != 1 || bytes < 0) return INVALID_VALUE;
    *handle = new Physical{static_cast<u64>(bytes), current, file};
    return SUCCESS;
}
Error cuMemAddressReserve(Address* address, u64 bytes, u64, Address, u64) {
    *address = reserve(bytes);
    return *address == 0 ? OUT_OF_MEMORY : SUCCESS;
}
Error cuMemAddressFree(Address address, u64 bytes) {
    give_back(address, bytes);
    return SUCCESS;
}
Error cuMemMap(Address address, u64 bytes, u64 offset, Physical* handle, u64) {
    std::lock_guard guard(lock);
    if (offset != 0 || bytes > handle->bytes) return INVALID_VALUE;
    const Error code = map_at(address, bytes, dup(handle->file), handle->device);
    // A mapping cannot be accessed before cuMemSetAccess grants access, so it has no device yet.
    if (code == SUCCESS) memory[address].device = -1;
    return code;
}
Error cuMemUnmap(Address address, u64 bytes) {
    std::lock_guard guard(lock);
    Memory* found;
    const Error code = ranged(address, bytes, &found);
    return code != SUCCESS ? code : unmap(address, true);
}
Error cuMemSetAccess(Address address, u64 bytes, const Access* all, u64 count) {
    std::lock_guard guard(lock);
    Memory* found;
    const Error code = ranged(address, bytes, &found);
    if (code != SUCCESS) return code;
    for (u64 at = 0; at < count; ++at) found->granted.insert(all[at].location.id);
    return SUCCESS;
}
Error cuIpcOpenMemHandle_v2(Address* address, Handle handle, u32) { return open_handle(address, handle, current); }

Error cuModuleLoadData(Module** module, const char* image) {
    ENTER(ModuleLoadData);
    host_waits("cuModuleLoadData");
    return load(module, image);
}
Error cuFuncSetAttribute(Function* function, u32 attribute, int value) {
    if (attribute == 8 && value <= 227 << 10) function->shared = static_cast<u32>(value);
    else if (attribute != 9 || value != 100) return INVALID_VALUE;
    return SUCCESS;
}
Error cuFuncLoad(Function*) { return SUCCESS; }
Error cuOccupancyMaxActiveBlocksPerMultiprocessor(int* each, Function* function, int threads, u64 shared) {
    if (shared > function->shared) return INVALID_VALUE;
    *each = static_cast<int>(resident(static_cast<u64>(threads), shared));
    return SUCCESS;
}
Error cuOccupancyMaxActiveClusters(int* clusters, Function* function, const Configuration* shape) {
    if (shape->shared > function->shared) return INVALID_VALUE;
    const u32 cluster = function->module->image.option("IRIS_GEMM_CLUSTER", 1);
    const u32 all = resident(shape->threads[0], shape->shared) * static_cast<u32>(multiprocessors());
    *clusters = static_cast<int>(all / cluster);
    return SUCCESS;
}
Error cuLaunchKernel(Function* function, u32 gx, u32 gy, u32 gz, u32 tx, u32 ty, u32 tz, u32 shared, Stream* stream,
                     void** parameters, void** extra) {
    if (gy * gz * ty * tz != 1 || extra != nullptr) return INVALID_VALUE;
    return launch("cuLaunchKernel", function, gx, tx, shared, stream, parameters, "");
}
Error cuLaunchKernelEx(const Configuration* shape, Function* function, void** parameters, void** extra) {
    const auto &groups = shape->groups, &threads = shape->threads;
    if (groups[1] * groups[2] * threads[1] * threads[2] != 1 || extra != nullptr) return INVALID_VALUE;
    std::string attributes;
    for (u64 at = 0; at < shape->attribute_count; ++at) {
        const Attribute& attribute = shape->attributes[at];
        if (attribute.id == 6 && attribute.value[0] == 1) attributes += " early";
        else attributes += " attribute" + std::to_string(attribute.id) + "=" + std::to_string(attribute.value[0]);
    }
    return launch("cuLaunchKernelEx", function, groups[0], threads[0], shape->shared, shape->stream, parameters, attributes);
}

/// Checks the arguments as the driver does: address and strides must be multiples of 16 bytes;
/// boxes may have at most 256 elements per dimension, and be at most as wide as the swizzle.
Error cuTensorMapEncodeTiled(Map* map, int kind, u32 dimensions, u64 address, const u64* sizes, const u64* strides,
                             const u32* box, const u32* steps, int interleave, int swizzle, int promotion, int fill) {
    const u64 width = u64{box[0]} * 2;
    const bool odd = dimensions != 2 || address % 16 != 0 || strides[0] % 16 != 0 || strides[0] >= 1ull << 40 ||
                     sizes[0] == 0 || sizes[1] == 0 || sizes[0] > 1ull << 32 || sizes[1] > 1ull << 32 ||
                     box[0] == 0 || box[1] == 0 || box[0] > 256 || box[1] > 256 || width > (16u << swizzle);
    if (odd || reinterpret_cast<u64>(map) % 64 != 0) return INVALID_VALUE;
    *map = Map{MAP,   address, {sizes[0], sizes[1]}, strides[0], {box[0], box[1]}, {steps[0], steps[1]}, kind, interleave, swizzle,
               promotion, fill, 0, {}};
    return SUCCESS;
}
}
