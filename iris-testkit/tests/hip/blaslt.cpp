// Fake of hipBLASLt that computes on the host, for tests of its callers. A product is computed by
// three loops, on a stream of the fake runtime in runtime.cpp, or at once if that runtime is not
// loaded. The fake is stricter than AMD's library: sizes must match, attributes must have their
// exact length, an algorithm is accepted only for the problem for which it was returned, the whole
// requested workspace is written, and the handle's device must be current. Passing tests on the
// fake say nothing about AMD's library.
//
// With FAKE_CUBLASLT the fake has the names, numbers and layouts of cuBLASLt instead. With HEADER
// the fake is compiled after AMD's header, with whose numbers and layouts it must agree.
// Environment variables: FAKE_HIP_LOG (file to which calls are logged), FAKE_BLASLT_VERSION
// (100202), FAKE_BLASLT_NO_KERNELS (the heuristic answers as AMD's 1.2.2 does if it has no kernels
// for the device).
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

#ifdef FAKE_CUBLASLT
#define NAME(name) cublasLt##name
enum Status { SUCCESS = 0, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum Operation { OP_N = 0, OP_T = 1, OP_C = 2 };
constexpr int COMPUTE_32F = 68;
enum Attribute { TRANSA = 3, TRANSB = 4, EPILOGUE = 7, BIAS_POINTER = 8, BIAS_TYPE = 26 };
enum Wish { WORKSPACE = 1, REDUCTION = 3, ALIGNMENT = 5 };
struct Algorithm {
    u64 data[8];
};
#else
#ifdef HEADER
#define NAME(name) fakeLt##name
#else
#define NAME(name) hipblasLt##name
#endif
enum Status { SUCCESS = 0, INVALID_VALUE = 3, EXECUTION_FAILED = 5, NOT_SUPPORTED = 7 };
enum Operation { OP_N = 111, OP_T = 112, OP_C = 113 };
constexpr int COMPUTE_32F = 2;
enum Attribute { TRANSA = 0, TRANSB = 1, EPILOGUE = 2, BIAS_POINTER = 3, BIAS_TYPE = 4 };
enum Wish { WORKSPACE = 1, REDUCTION = -1, ALIGNMENT = -1 };
struct Algorithm {
    std::uint8_t data[16];
    std::size_t workspace;
};
#endif
enum Type { F32 = 0, F16 = 2, BF16 = 14 };
enum Epilogue { DEFAULT = 1, BIAS = 4 };
struct Answer {
    Algorithm algorithm;
    std::size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

#ifdef HEADER
#pragma GCC diagnostic ignored "-Wenum-compare"
static_assert(SUCCESS == HIPBLAS_STATUS_SUCCESS && INVALID_VALUE == HIPBLAS_STATUS_INVALID_VALUE);
static_assert(NOT_SUPPORTED == HIPBLAS_STATUS_NOT_SUPPORTED);
static_assert(OP_N == HIPBLAS_OP_N && OP_T == HIPBLAS_OP_T && OP_C == HIPBLAS_OP_C);
static_assert(COMPUTE_32F == HIPBLAS_COMPUTE_32F && F32 == HIP_R_32F && F16 == HIP_R_16F && BF16 == HIP_R_16BF);
static_assert(TRANSA == HIPBLASLT_MATMUL_DESC_TRANSA && TRANSB == HIPBLASLT_MATMUL_DESC_TRANSB);
static_assert(EPILOGUE == HIPBLASLT_MATMUL_DESC_EPILOGUE && BIAS_TYPE == HIPBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);
static_assert(BIAS_POINTER == HIPBLASLT_MATMUL_DESC_BIAS_POINTER && WORKSPACE == HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
static_assert(DEFAULT == HIPBLASLT_EPILOGUE_DEFAULT && BIAS == HIPBLASLT_EPILOGUE_BIAS);
static_assert(sizeof(Algorithm) == sizeof(hipblasLtMatmulAlgo_t) && sizeof(Answer) == sizeof(hipblasLtMatmulHeuristicResult_t));
static_assert(offsetof(Answer, workspace) == offsetof(hipblasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(Answer, state) == offsetof(hipblasLtMatmulHeuristicResult_t, state));
#endif

void note(const std::string& line) {
    const char* file = std::getenv("FAKE_HIP_LOG");
    if (file != nullptr) std::ofstream(file, std::ios::app) << line + "\n";
}
/// Returns `code`, the result of a call, and logs the call unless `code` is success.
template <class... Parts> int outcome(int code, Parts... parts) {
    std::ostringstream line;
    line << "blaslt";
    ((line << ' ' << parts), ...);
    line << " = " << code;
    if (code != SUCCESS) note(line.str());
    return code;
}

#ifdef FAKE_CUBLASLT
constexpr const char* RUNTIME = "libcuda.so.1";
#else
constexpr const char* RUNTIME = "libamdhip64.so.7";
#endif
/// Looks up a function of the HIP runtime; null if the runtime is not loaded or lacks it.
template <class Function> Function runtime(const char* name) {
    static void* library = dlopen(RUNTIME, RTLD_NOW | RTLD_NOLOAD);
    return library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, name));
}
int current() {
    const auto device = runtime<int (*)()>("standin_device");
    return device == nullptr ? 0 : device();
}
/// Whether `device` can access the `bytes` bytes at `address`, as the loaded fake runtime says.
bool reaches(int device, u64 address, u64 bytes) {
    const auto may = runtime<bool (*)(int, u64, u64)>("standin_reaches");
    return address != 0 && (may == nullptr || may(device, address, bytes));
}

struct Handle {
    int device;
};
struct Layout {
    int type;
    u64 rows, cols;
    std::int64_t ld;
};
struct Desc {
    int left = OP_N, right = OP_N, epilogue = DEFAULT, bias_type = -1;
    u64 bias = 0;
};
struct Preference {
    u64 workspace = 0;
    u32 reduction = ~0u, alignment[4] = {256, 256, 256, 256};
};

std::mutex lock;
/// Objects of the library, such as layouts, that were created and not yet destroyed.
auto& live = *new std::set<void*>;
std::atomic<int> handles = 0;
/// Number of objects that were ever created, and number of rows (set by a test) for which products
/// are refused.
u64 ever = 0, refused = 0;
template <class Thing> int made(Thing** to, Thing value) {
    std::lock_guard guard(lock);
    ++ever;
    live.insert(*to = new Thing(value));
    return SUCCESS;
}
template <class Thing> int destroyed(Thing* thing) {
    std::lock_guard guard(lock);
    if (live.erase(thing) == 0) return outcome(INVALID_VALUE, "nothing to destroy");
    delete thing;
    return SUCCESS;
}
bool known(std::initializer_list<const void*> all) {
    std::lock_guard guard(lock);
    for (const void* one : all) {
        if (live.count(const_cast<void*>(one)) == 0) return false;
    }
    return true;
}

u64 size_of(int type) { return type == F32 ? 4 : 2; }
bool is_type(int type) { return type == F32 || type == F16 || type == BF16; }

float read(int type, u64 base, u64 at) {
    if (type == F32) return reinterpret_cast<const float*>(base)[at];
    const u32 bits = reinterpret_cast<const std::uint16_t*>(base)[at];
    u32 whole = bits << 16;
    if (type == F16) {
        const u32 exponent = bits >> 10 & 31, fraction = bits & 1023;
        float value = exponent == 0 ? fraction * 0x1p-24f : (1024 + fraction) * 0x1p-25f;
        for (u32 i = 0; i < exponent; ++i) value *= 2;
        if (exponent == 31) value = fraction == 0 ? __builtin_inff() : __builtin_nanf("");
        return bits >> 15 ? -value : value;
    }
    float value;
    std::memcpy(&value, &whole, 4);
    return value;
}
void write(int type, u64 base, u64 at, float value) {
    if (type == F32) {
        reinterpret_cast<float*>(base)[at] = value;
        return;
    }
    u32 bits;
    std::memcpy(&bits, &value, 4);
    u32 half;
    if (type == BF16) {
        half = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    } else {
        // Rounds `value` to the nearest f16, ties to even.
        float size = value < 0 ? -value : value, step = 0x1p-24f;
        u32 exponent = 0;
        while (size >= step * 2048 || (exponent == 0 && size >= step * 1024)) {
            if (exponent > 0) step *= 2;
            ++exponent;
        }
        const u32 steps = static_cast<u32>(__builtin_rintf(size / step));
        half = exponent == 0 ? steps : (exponent << 10) + (steps - 1024);
        half |= bits >> 16 & 0x8000;
    }
    reinterpret_cast<std::uint16_t*>(base)[at] = static_cast<std::uint16_t>(half);
}

/// Computes the product's sizes (rows, columns, depth); returns whether the matrices match. C, the
/// matrix that is added, must have the shape and order of the result D; only its leading dimension
/// may differ.
bool sizes(const Desc& desc, const Layout& a, const Layout& b, const Layout& c, const Layout& d, u64 (&to)[3]) {
    const u64 depth = desc.left == OP_N ? a.cols : a.rows;
    const bool fit = (desc.left == OP_N ? a.rows : a.cols) == d.rows && (desc.right == OP_N ? b.cols : b.rows) == d.cols &&
                     (desc.right == OP_N ? b.rows : b.cols) == depth;
    to[0] = d.rows, to[1] = d.cols, to[2] = depth;
    const bool alike = c.type == d.type && c.rows == d.rows && c.cols == d.cols;
    return fit && alike && a.type == b.type && (d.type == a.type || d.type == F32);
}

/// Hash of everything that an algorithm depends on, except the number of columns of the result.
/// `adds` is true if the algorithm was requested with a layout for C and adds C to the product.
u64 problem(const Desc& desc, const Layout& a, [[maybe_unused]] const Layout& b, [[maybe_unused]] const Layout& c,
            [[maybe_unused]] const Layout& d, bool adds, const u64 (&size)[3]) {
    u64 hash = 1469598103934665603u;
    for (u64 part : {size[0], size[2], u64(a.type), u64(d.type), u64(desc.left), u64(desc.right), u64(desc.epilogue),
                     u64(adds)}) {
        hash = (hash ^ part) * 1099511628211u;
    }
#ifndef FAKE_CUBLASLT
    for (u64 part : {size[1], u64(a.ld), u64(b.ld), u64(c.ld), u64(d.ld)}) hash = (hash ^ part) * 1099511628211u;
#endif
    return hash;
}

/// Bytes of the workspace that every algorithm overwrites; a smaller workspace is refused.
constexpr u64 USED = 4096;

} // namespace

extern "C" {

// Functions for tests: `fake_made` returns the number of objects ever created; the next ones return
// the number of live objects and set the number of rows for which products are refused.
u64 fake_made() {
    std::lock_guard guard(lock);
    return ever;
}
u64 fake_live() {
    std::lock_guard guard(lock);
    return live.size();
}
int fake_refuse(u64 rows) {
    std::lock_guard guard(lock);
    refused = rows;
    return SUCCESS;
}

#ifdef FAKE_CUBLASLT
std::size_t cublasLtGetVersion() { return 130102; }
const char* cublasLtGetStatusName(int code) {
    return code == INVALID_VALUE ? "CUBLAS_STATUS_INVALID_VALUE" : "CUBLAS_STATUS_NOT_SUPPORTED";
}
#else
int NAME(GetVersion)(Handle* handle, int* version) {
    if (!known({handle})) return outcome(INVALID_VALUE, "GetVersion");
    const char* told = std::getenv("FAKE_BLASLT_VERSION");
    *version = told == nullptr ? 100202 : std::atoi(told);
    return SUCCESS;
}
#endif
int NAME(Create)(Handle** handle) {
    ++handles;
    return made(handle, Handle{current()});
}
int NAME(Destroy)(Handle* handle) {
    const int code = destroyed(handle);
    std::lock_guard guard(lock);
    // A program must destroy all objects before the last handle.
    if (--handles == 0 && !live.empty()) outcome(INVALID_VALUE, "Destroy leaves", live.size());
    return code;
}
int NAME(MatmulDescCreate)(Desc** desc, int compute, int scale) {
    if (compute != COMPUTE_32F || scale != F32) return outcome(INVALID_VALUE, "MatmulDescCreate", compute, scale);
    return made(desc, Desc{});
}
int NAME(MatmulDescDestroy)(Desc* desc) { return destroyed(desc); }
int NAME(MatmulDescSetAttribute)(Desc* desc, int attribute, const void* value, std::size_t bytes) {
    u64 given = 0;
    if (!known({desc}) || bytes > 8) return outcome(INVALID_VALUE, "MatmulDescSetAttribute", attribute);
    std::memcpy(&given, value, bytes);
    const int number = static_cast<int>(given);
    const bool is_operation = number == OP_N || number == OP_T || number == OP_C;
    if (attribute == TRANSA && bytes == 4 && is_operation) desc->left = number;
    else if (attribute == TRANSB && bytes == 4 && is_operation) desc->right = number;
    else if (attribute == EPILOGUE && bytes == 4 && (number == DEFAULT || number == BIAS)) desc->epilogue = number;
    else if (attribute == BIAS_POINTER && bytes == 8) desc->bias = given;
    else if (attribute == BIAS_TYPE && bytes == 4 && is_type(number)) desc->bias_type = number;
    else return outcome(INVALID_VALUE, "MatmulDescSetAttribute", attribute, number, bytes);
    return SUCCESS;
}
int NAME(MatrixLayoutCreate)(Layout** layout, int type, u64 rows, u64 cols, std::int64_t ld) {
    if (!is_type(type) || ld < static_cast<std::int64_t>(rows)) {
        return outcome(INVALID_VALUE, "MatrixLayoutCreate", type, rows, cols, ld);
    }
    return made(layout, Layout{type, rows, cols, ld});
}
int NAME(MatrixLayoutDestroy)(Layout* layout) { return destroyed(layout); }
int NAME(MatmulPreferenceCreate)(Preference** preference) { return made(preference, Preference{}); }
int NAME(MatmulPreferenceDestroy)(Preference* preference) { return destroyed(preference); }
int NAME(MatmulPreferenceSetAttribute)(Preference* preference, int wish, const void* value, std::size_t bytes) {
    if (!known({preference})) return outcome(INVALID_VALUE, "MatmulPreferenceSetAttribute", wish);
    const bool aligns = ALIGNMENT > 0 && wish >= ALIGNMENT && wish < ALIGNMENT + 4;
    if (wish == WORKSPACE && bytes == 8) std::memcpy(&preference->workspace, value, 8);
    else if (REDUCTION > 0 && wish == REDUCTION && bytes == 4) std::memcpy(&preference->reduction, value, 4);
    else if (aligns && bytes == 4) std::memcpy(&preference->alignment[wish - ALIGNMENT], value, 4);
    else return outcome(INVALID_VALUE, "MatmulPreferenceSetAttribute", wish, bytes);
    return SUCCESS;
}

/// Heuristic for tests: finds no algorithm for a depth of 13, and one for every other problem.
int NAME(MatmulAlgoGetHeuristic)(Handle* handle, Desc* desc, Layout* a, Layout* b, Layout* c, Layout* d,
                                 Preference* preference, int most, Answer* answers, int* count) {
    u64 size[3];
    const bool good = known({handle, desc, a, b, c, d, preference}) && most > 0 && handle->device == current() &&
                      sizes(*desc, *a, *b, *c, *d, size) && preference->workspace >= USED;
    if (!good) return outcome(INVALID_VALUE, "MatmulAlgoGetHeuristic");
    if (std::getenv("FAKE_BLASLT_NO_KERNELS") != nullptr) return INVALID_VALUE;
    *count = size[2] == 13 ? 0 : 1;
#ifdef FAKE_CUBLASLT
    if (*count == 0) return NOT_SUPPORTED;
#endif
    std::memset(answers, 0xff, sizeof(Answer) * most);
    const u64 of[2] = {problem(*desc, *a, *b, *c, *d, c != d, size), size[1]};
    for (int at = 0; at < *count; ++at) {
        answers[at] = Answer{};
        std::memcpy(answers[at].algorithm.data, of, sizeof of);
        answers[at].workspace = USED;
        answers[at].waves = 1;
#ifndef FAKE_CUBLASLT
        answers[at].algorithm.workspace = preference->workspace;
#endif
    }
    return SUCCESS;
}

int NAME(Matmul)(Handle* handle, Desc* desc, const float* alpha, u64 a, Layout* la, u64 b, Layout* lb, const float* beta,
                 u64 c, Layout* lc, u64 d, Layout* ld, const Algorithm* algorithm, u64 workspace, std::size_t bytes,
                 void* stream) {
    u64 size[3], of[2];
    if (!known({handle, desc, la, lb, lc, ld}) || !sizes(*desc, *la, *lb, *lc, *ld, size)) return outcome(INVALID_VALUE, "Matmul");
    const int device = handle->device;
    const auto whole = [](const Layout& it) { return ((it.cols - 1) * it.ld + it.rows) * size_of(it.type); };
    const bool biased = desc->epilogue == BIAS;
    const int bias_type = desc->bias_type < 0 ? ld->type : desc->bias_type;
    // C, the matrix that is added, must be the result D itself, or must not overlap it.
    const bool apart = c + whole(*lc) <= d || d + whole(*ld) <= c;
    const bool same = c == d && lc->ld == ld->ld;
    const bool there = reaches(device, a, whole(*la)) && reaches(device, b, whole(*lb)) && reaches(device, c, whole(*lc)) &&
                       reaches(device, d, whole(*ld)) && reaches(device, workspace, bytes) && (!biased || reaches(device, desc->bias, size[0] * size_of(bias_type)));
    if (!there || device != current() || !(same || apart) || bytes < USED || workspace % 16 != 0 || algorithm == nullptr) {
        return outcome(INVALID_VALUE, "Matmul on", current());
    }
    // Products with `refused` rows are refused. The library is column-major, so its columns are the
    // rows of a row-major result.
    if (size[1] == refused) return NOT_SUPPORTED;
    std::memcpy(of, algorithm->data, sizeof of);
    if (of[0] != problem(*desc, *la, *lb, *lc, *ld, *beta != 0, size) || of[1] < size[1]) {
        // AMD's library would compute a wrong result with the algorithm of another product.
        return outcome(sizeof *algorithm == 64 ? NOT_SUPPORTED : INVALID_VALUE, "Matmul by an algorithm of another product");
    }
    const Desc to = *desc;
    const Layout left = *la, right = *lb, added = *lc, result = *ld;
    const float by = *alpha, before = *beta;
    const u64 rows = size[0], cols = size[1], depth = size[2];
    std::function<void()> multiply = [=] {
        std::memset(reinterpret_cast<void*>(workspace), 0xee, USED);
        for (u64 col = 0; col < cols; ++col) {
            for (u64 row = 0; row < rows; ++row) {
                float sum = 0;
                for (u64 at = 0; at < depth; ++at) {
                    sum += read(left.type, a, to.left == OP_N ? at * left.ld + row : row * left.ld + at) *
                           read(right.type, b, to.right == OP_N ? col * right.ld + at : at * right.ld + col);
                }
                sum *= by;
                if (before != 0) sum += before * read(added.type, c, col * added.ld + row);
                if (biased) sum += read(bias_type, to.bias, row);
                write(result.type, d, col * result.ld + row, sum);
            }
        }
    };
    std::ostringstream line;
    line << "hipblasLtMatmul " << rows << " x " << cols << " x " << depth << (before != 0 ? " and C" : "") << " on " << device << " = 0";
    note(line.str());
    const auto enqueue = runtime<u32 (*)(void*, const char*, const char*, void (*)(void*), void*)>("standin_enqueue");
    if (enqueue == nullptr) {
        multiply();
        return SUCCESS;
    }
    // Line of a driver's log, which is all that becomes of a product if the driver does not compute.
    const auto shown = runtime<const char* (*)(u64)>("standin_shown");
    line.str("");
    line << size[0] << "x" << size[1] << "x" << size[2] << " |";
    const auto matrix = [&](const char* name, u64 at, const Layout& it) {
        line << " " << name << "=" << shown(at) << "," << it.rows << "x" << it.cols << "/" << it.ld << ",type" << it.type;
    };
    matrix("a", a, *la);
    matrix("b", b, *lb);
    matrix("c", c, *lc);
    matrix("d", d, *ld);
    line << " transposes=" << desc->left << "," << desc->right << " alpha=" << *alpha << " beta=" << *beta;
    if (biased) line << " bias=" << shown(desc->bias) << ",type" << bias_type;
    line << " workspace=" << shown(workspace) << "," << bytes << " algorithm=" << of[0] << "," << of[1];
    const auto run = [](void* data) {
        const std::unique_ptr<std::function<void()>> work(static_cast<std::function<void()>*>(data));
        (*work)();
    };
    const u32 code = enqueue(stream, "Matmul", line.str().c_str(), run, new std::function<void()>(multiply));
    return code == 0 ? static_cast<int>(SUCCESS) : outcome(EXECUTION_FAILED, "Matmul on a stream", code);
}
}

#ifdef HEADER
/// Sizes in bytes of a function's return value and of its arguments, to check its declaration.
template <class Gives, class... Takes> constexpr std::array<std::size_t, 1 + sizeof...(Takes)> form(Gives (*)(Takes...)) {
    return {sizeof(Gives), sizeof(Takes)...};
}
#define SAME(name) static_assert(form(&hipblasLt##name) == form(&NAME(name)))
SAME(GetVersion);
SAME(Create);
SAME(Destroy);
SAME(MatmulDescCreate);
SAME(MatmulDescSetAttribute);
SAME(MatmulDescDestroy);
SAME(MatrixLayoutCreate);
SAME(MatrixLayoutDestroy);
SAME(MatmulPreferenceCreate);
SAME(MatmulPreferenceSetAttribute);
SAME(MatmulPreferenceDestroy);
SAME(MatmulAlgoGetHeuristic);
SAME(Matmul);
#endif
