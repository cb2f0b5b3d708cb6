// Functions that return definitions of the headers, so that a test can compare them with those in
// Rust.
#include "iris/args.h"
#include "iris/body/deliver.h"
#include "iris/body/gather.h"
#include "iris/gemm/producer.h"
#include "iris/body/accumulate.h"
#include "iris/body/reduce.h"
#include "iris/tiles.h"

using namespace iris;

namespace {
struct Row {
    const char* name;
    int order, scope;
};
constexpr Row ROWS[] = {
#define IRIS_ROW(name, order, scope)                                                               \
    {#name, static_cast<int>(Order::order), static_cast<int>(Scope::scope)},
    IRIS_ACCESSES(IRIS_ROW)
#undef IRIS_ROW
};
} // namespace

extern "C" {

u32 mirror_access(u32 index, const char** name, int* order, int* scope) {
    if (index < sizeof(ROWS) / sizeof(Row)) {
        *name = ROWS[index].name;
        *order = ROWS[index].order;
        *scope = ROWS[index].scope;
    }
    return sizeof(ROWS) / sizeof(Row);
}

/// Returns name, code, size and roles of element type number `index`, and the number of types.
u32 mirror_dtype(u32 index, const char** name, u32* code, u32* bytes, u32* roles) {
    constexpr struct {
        const char* name;
        u32 code, bytes, roles;
    } rows[] = {
#define IRIS_ROW(name, code, bytes, roles) {#name, code, bytes, roles},
        IRIS_DTYPES(IRIS_ROW)
#undef IRIS_ROW
    };
    constexpr u32 count = sizeof(rows) / sizeof(rows[0]);
    if (index < count) {
        *name = rows[index].name;
        *code = rows[index].code;
        *bytes = rows[index].bytes;
        *roles = rows[index].roles;
    }
    return count;
}

float mirror_erf(float x) { return erf(x); }
u16 mirror_narrow(u32 dtype, float value) { return narrow(dtype, value); }
float mirror_widen(u32 dtype, u16 bits) { return widen(dtype, bits); }

/// Offset of field number `field` of OpArgs; the test numbers the fields in the order of this list.
u64 mirror_offset(u32 field) {
    const u64 offsets[] = {
        IRIS_OFFSET_OF(OpArgs, channel),     IRIS_OFFSET_OF(OpArgs, record),
        IRIS_OFFSET_OF(OpArgs, a),           IRIS_OFFSET_OF(OpArgs, epsilon),
        IRIS_OFFSET_OF(OpArgs, bias),        IRIS_OFFSET_OF(OpArgs, residual),
        IRIS_OFFSET_OF(OpArgs, weight),      IRIS_OFFSET_OF(OpArgs, normed),
        IRIS_OFFSET_OF(OpArgs, inbox),       IRIS_OFFSET_OF(OpArgs, slot),
        IRIS_OFFSET_OF(OpArgs, results),     IRIS_OFFSET_OF(OpArgs, result_slot),
        IRIS_OFFSET_OF(OpArgs, workspace),   IRIS_OFFSET_OF(OpArgs, pulled),
        IRIS_OFFSET_OF(OpArgs, pulled_ld),   IRIS_OFFSET_OF(OpArgs, trace),
        IRIS_OFFSET_OF(OpArgs, counters),    IRIS_OFFSET_OF(OpArgs, m),
        IRIS_OFFSET_OF(OpArgs, tile_m),      IRIS_OFFSET_OF(OpArgs, k_group),
        IRIS_OFFSET_OF(OpArgs, max_tiles),   IRIS_OFFSET_OF(OpArgs, max_results),
        IRIS_OFFSET_OF(OpArgs, wire),        IRIS_OFFSET_OF(OpArgs, epilogue),
        IRIS_OFFSET_OF(OpArgs, producer),    IRIS_OFFSET_OF(OpArgs, root),
        IRIS_OFFSET_OF(OpArgs, dedicated_workgroups),    IRIS_OFFSET_OF(OpArgs, shard),
        IRIS_OFFSET_OF(OpArgs, m_contiguous), IRIS_OFFSET_OF(OpArgs, trace_spans),
        IRIS_OFFSET_OF(OpArgs, sources),
        IRIS_OFFSET_OF(OpArgs, list) + IRIS_OFFSET_OF(ListTensor, from_pitch),
        IRIS_OFFSET_OF(OpArgs, list) + IRIS_OFFSET_OF(ListTensor, to),
        IRIS_OFFSET_OF(OpArgs, list) + IRIS_OFFSET_OF(ListTensor, to_pitch),
        IRIS_OFFSET_OF(OpArgs, list) + IRIS_OFFSET_OF(ListTensor, row),
        sizeof(ListTensor),                  IRIS_OFFSET_OF(OpArgs, factors),
        IRIS_OFFSET_OF(OpArgs, addend),      sizeof(OpArgs),
        IRIS_OFFSET_OF(TileView, channel),   IRIS_OFFSET_OF(TileView, record),
        IRIS_OFFSET_OF(TileView, rows),      IRIS_OFFSET_OF(TileView, tile_m),
        IRIS_OFFSET_OF(TileView, arrival),   IRIS_OFFSET_OF(TileView, root),
        IRIS_OFFSET_OF(TileView, groups),    sizeof(TileView),
    };
    return field < sizeof(offsets) / sizeof(u64) ? offsets[field] : 0;
}
}
