// Element types: one row for each, as iris_kernels::dtype::ROWS on the host, and everything that depends on
// the type: conversions, vectors, items of the LL protocol, names of instructions. No other header decides by
// type or by size of an element. Functions have an arm for each type and none for other codes.
#ifndef IRIS_DTYPE_H
#define IRIS_DTYPE_H

#include "iris/port.h"

// Lists of element types, with one row per type: name, code as in Matrix::dtype, bytes of an element, roles
// (bits of iris::Role). IRIS_DTYPES has all types, IRIS_DTYPES_USED the types with a role, IRIS_DTYPES_16
// those of 16 bits; IRIS_DTYPES_16_TRIED is the order in which a kernel tries the 16-bit types.
#define IRIS_DTYPES_16(X) X(F16, 1, 2, ANY_ROLE) X(BF16, 2, 2, ANY_ROLE)
#define IRIS_DTYPES_16_TRIED(X) X(BF16) X(F16)
#define IRIS_DTYPES_USED(X) X(F32, 0, 4, ANY_ROLE) IRIS_DTYPES_16(X)
#if IRIS_TEST_DTYPE
#define IRIS_DTYPES(X) IRIS_DTYPES_USED(X) X(F8E4M3, 3, 1, NO_ROLE)
#else
#define IRIS_DTYPES(X) IRIS_DTYPES_USED(X)
#endif

// Type of A and B, and type of C of a whole-matrix GEMM, of this build.
#ifndef IRIS_FACTOR
#define IRIS_FACTOR 2
#endif
#ifndef IRIS_RESULT
#define IRIS_RESULT IRIS_FACTOR
#endif

// Columns for the preprocessor, by code: name in error texts; whether tensor cores of NVIDIA multiply the type
// (wgmma, mma.sync), and its name in instructions. IRIS_OF(column, IRIS_FACTOR) is the entry of a build.
#define IRIS_NAME_0 "f32"
#define IRIS_NAME_1 "f16"
#define IRIS_NAME_2 "bf16"
#define IRIS_NAME_3 "f8e4m3"
#define IRIS_HAS_MMA_0 0
#define IRIS_HAS_MMA_1 1
#define IRIS_HAS_MMA_2 1
#define IRIS_HAS_MMA_3 0
#define IRIS_MMA_1 "f16"
#define IRIS_MMA_2 "bf16"
#define IRIS_OF(column, code) IRIS_PASTED(column, code)
#define IRIS_PASTED(column, code) column##code
#define IRIS_FACTOR_MMA IRIS_OF(IRIS_MMA_, IRIS_FACTOR)
#define IRIS_RESULT_MMA IRIS_OF(IRIS_MMA_, IRIS_RESULT)

// Macros for code that decides by element type: IRIS_IS is the condition for a type in a chain of ifs,
// IRIS_LABEL_name its label in a switch, and IRIS_NO_OTHER_TYPE ends the chain or switch. In tests on a host
// any other code traps. A device gets no other code, because the host refuses it, so the last arm needs no
// test.
#define IRIS_LABEL_F32 case F32
#define IRIS_LABEL_F16 case F16
#if IRIS_PORT_HOST
#define IRIS_IS(dtype, name) ((dtype) == name)
#define IRIS_LABEL_BF16 case BF16
#define IRIS_NO_OTHER_TYPE __builtin_trap()
#else
#define IRIS_IS(dtype, name) (name == LAST_TYPE || (dtype) == name)
#define IRIS_LABEL_BF16 default
#define IRIS_NO_OTHER_TYPE __builtin_unreachable()
#endif

namespace iris {

/// Purposes for which operators take a type, as iris_kernels::dtype::Role: elements of A and B; of C, bias and
/// residual; of what travels between ranks.
enum Role : u32 { NO_ROLE = 0, FACTOR_ROLE = 1, RESULT_ROLE = 2, WIRE_ROLE = 4, ANY_ROLE = 7 };

/// Codes of element types.
enum : u32 {
#define IRIS_ROW(name, code, bytes, roles) name = code,
    IRIS_DTYPES(IRIS_ROW)
#undef IRIS_ROW
    /// The last of the types with a role.
    LAST_TYPE = BF16
};

#define IRIS_ROW(name, code, bytes, roles)                                                         \
    static_assert((roles) != 0 && name <= LAST_TYPE, #name " comes after LAST_TYPE, or has no role");
IRIS_DTYPES_USED(IRIS_ROW)
#undef IRIS_ROW

/// Size and roles of an element type, as compile-time constants.
template <u32 CODE> struct Dtype;
#define IRIS_ROW(name, code, bytes, roles)                                                         \
    template <> struct Dtype<name> {                                                                 \
        enum : u32 { BYTES = bytes, ROLES = roles };                                               \
    };
IRIS_DTYPES(IRIS_ROW)
#undef IRIS_ROW
static_assert((u32(Dtype<IRIS_FACTOR>::ROLES) & FACTOR_ROLE) != 0,
              "IRIS_FACTOR: " IRIS_OF(IRIS_NAME_, IRIS_FACTOR) " is no type of factors");
static_assert((u32(Dtype<IRIS_RESULT>::ROLES) & RESULT_ROLE) != 0,
              "IRIS_RESULT: " IRIS_OF(IRIS_NAME_, IRIS_RESULT) " is no type of results");

/// Size of an element in bytes.
IRIS_DEVICE constexpr u32 element_bytes(u32 dtype) {
#define IRIS_ROW(name, code, bytes, roles)                                                         \
    if (IRIS_IS(dtype, name)) return bytes;
    IRIS_DTYPES_USED(IRIS_ROW)
#undef IRIS_ROW
    IRIS_NO_OTHER_TYPE;
}

/// Number of elements in the 8 bytes of an item of the LL protocol.
IRIS_DEVICE constexpr u32 item_elements(u32 dtype) {
#define IRIS_ROW(name, code, bytes, roles)                                                         \
    if (IRIS_IS(dtype, name)) return 8 / bytes;
    IRIS_DTYPES_USED(IRIS_ROW)
#undef IRIS_ROW
    IRIS_NO_OTHER_TYPE;
}

/// In tests on a host, traps if kernels do not use the type. On a device it does nothing.
IRIS_DEVICE void known(u32 dtype) { (void)element_bytes(dtype); }

/// Conversions of a 16-bit type.
template <u32 CODE> struct Half;
template <> struct Half<F16> {
    IRIS_DEVICE static float widen(u16 bits) { return port::half_to_float(bits); }
    IRIS_DEVICE static u16 narrow(float value) { return port::float_to_half(value); }
};
template <> struct Half<BF16> {
    IRIS_DEVICE static float widen(u16 bits) {
        return __builtin_bit_cast(float, static_cast<u32>(bits) << 16);
    }
    IRIS_DEVICE static u16 narrow(float value) { return port::float_to_bfloat(value); }
};

IRIS_DEVICE float widen(u32 dtype, u16 bits) {
#define IRIS_ROW(name, code, bytes, roles)                                                         \
    if (IRIS_IS(dtype, name)) return Half<name>::widen(bits);
    IRIS_DTYPES_16(IRIS_ROW)
#undef IRIS_ROW
    IRIS_NO_OTHER_TYPE;
}
IRIS_DEVICE u16 narrow(u32 dtype, float value) {
#define IRIS_ROW(name, code, bytes, roles)                                                         \
    if (IRIS_IS(dtype, name)) return Half<name>::narrow(value);
    IRIS_DTYPES_16(IRIS_ROW)
#undef IRIS_ROW
    IRIS_NO_OTHER_TYPE;
}
/// Rounds `value` to the element type `dtype` and converts it back to f32.
IRIS_DEVICE float rounded(u32 dtype, float value) {
    return dtype == F32 ? value : widen(dtype, narrow(dtype, value));
}

IRIS_DEVICE float load_element(u64 address, u32 dtype) {
    known(dtype);
    return dtype == F32 ? port::read<float>(address) : widen(dtype, port::read<u16>(address));
}
IRIS_DEVICE void store_element(u64 address, u32 dtype, float value) {
    if (dtype == F32) port::write(address, value);
    else port::write(address, narrow(dtype, value));
}

/// Bits of an element in memory, and of a value that is rounded to an element.
IRIS_DEVICE u32 load_bits(u64 address, u32 dtype) {
    known(dtype);
    return dtype == F32 ? port::read<u32>(address) : port::read<u16>(address);
}
IRIS_DEVICE u32 bits_of(u32 dtype, float value) {
    return dtype == F32 ? __builtin_bit_cast(u32, value) : narrow(dtype, value);
}
IRIS_DEVICE void store_bits(u64 address, u32 dtype, u32 bits) {
    known(dtype);
    if (dtype == F32) port::write(address, bits);
    else port::write(address, static_cast<u16>(bits));
}

/// Number of elements of a vector, which has 16 bytes for a 16-bit type.
constexpr u32 VECTOR_WIDTH = 8;

/// Whether a vector of the type is one Vec16.
IRIS_DEVICE constexpr bool is_one_access(u32 dtype) { return VECTOR_WIDTH * element_bytes(dtype) == sizeof(Vec16); }

struct Values {
    float v[VECTOR_WIDTH];
};

/// Vector in the format that it has in memory. After a load in this form, a thread waits for the
/// data only where the values are used.
struct Raw {
    Vec16 low, high;
};
IRIS_DEVICE Raw load_raw(u64 address, u32 dtype) {
    known(dtype);
    Raw raw{};
    raw.low = port::read<Vec16>(address);
    if (dtype == F32) raw.high = port::read<Vec16>(address + 16);
    return raw;
}
IRIS_DEVICE Values values_of(const Raw& raw, u32 dtype) {
    Values values;
    if (dtype == F32) {
        IRIS_UNROLL
        for (u32 i = 0; i < 4; ++i) {
            values.v[i] = __builtin_bit_cast(float, raw.low.word[i]);
            values.v[i + 4] = __builtin_bit_cast(float, raw.high.word[i]);
        }
    } else {
        IRIS_UNROLL
        for (u32 i = 0; i < 4; ++i) {
            values.v[2 * i] = widen(dtype, static_cast<u16>(raw.low.word[i]));
            values.v[2 * i + 1] = widen(dtype, static_cast<u16>(raw.low.word[i] >> 16));
        }
    }
    return values;
}
/// Rounds the values of a vector to a 16-bit type.
IRIS_DEVICE Vec16 packed(u32 dtype, const Values& values) {
    Vec16 vector;
    IRIS_UNROLL
    for (u32 i = 0; i < 4; ++i) {
        vector.word[i] = static_cast<u32>(narrow(dtype, values.v[2 * i])) |
                         static_cast<u32>(narrow(dtype, values.v[2 * i + 1])) << 16;
    }
    return vector;
}
/// Stores a full vector, rounded to the element type `dtype`.
IRIS_DEVICE void store_whole(u64 address, u32 dtype, const Values& values) {
    if (dtype == F32) {
        Vec16 low, high;
        IRIS_UNROLL
        for (u32 i = 0; i < 4; ++i) {
            low.word[i] = __builtin_bit_cast(u32, values.v[i]);
            high.word[i] = __builtin_bit_cast(u32, values.v[i + 4]);
        }
        port::write(address, low);
        port::write(address + 16, high);
    } else {
        port::write(address, packed(dtype, values));
    }
}

/// Elements of an item (8 bytes of a message), converted to f32: two of f32 or four of a 16-bit
/// type.
struct ItemValues {
    float v[4];
};

/// Element `i` of the four 16-bit elements of an item.
IRIS_DEVICE u16 half_of(const u32 (&data)[2], u32 i) { return static_cast<u16>(data[i / 2] >> i % 2 * 16); }
/// Converts the data of an item to the values of its elements; pack_item() converts back.
IRIS_DEVICE ItemValues unpack_item(u32 dtype, const u32 (&data)[2]) {
    known(dtype);
    ItemValues values;
    if (dtype == F16) {
        IRIS_UNROLL
        for (u32 i = 0; i < 4; ++i) values.v[i] = Half<F16>::widen(half_of(data, i));
    } else {
        IRIS_UNROLL
        for (u32 i = 0; i < 4; ++i) values.v[i] = Half<BF16>::widen(half_of(data, i));
    }
    // The value is selected without branches. For three branches that end in one value, LLVM 22
    // generates wrong code for gfx942: it reads both halves of a register of which it has just
    // set one.
    IRIS_UNROLL
    for (u32 i = 0; i < 4; ++i) {
        const float word = i < 2 ? __builtin_bit_cast(float, data[i]) : 0.0f;
        values.v[i] = dtype == F32 ? word : values.v[i];
    }
    return values;
}
#define IRIS_ROW(name, code, bytes, roles)                                                         \
    static_assert(((roles) & WIRE_ROLE) == 0 || name <= BF16, "unpack_item() has no arm for " #name);
IRIS_DTYPES(IRIS_ROW)
#undef IRIS_ROW
IRIS_DEVICE void pack_item(u32 dtype, const ItemValues& values, u32 (&data)[2]) {
    IRIS_UNROLL
    for (u32 i = 0; i < 2; ++i) {
        const float low = values.v[2 * i], high = values.v[2 * i + 1];
        if (dtype == F32) data[i] = __builtin_bit_cast(u32, values.v[i]);
#define IRIS_ROW(name, code, bytes, roles)                                                         \
        else if (IRIS_IS(dtype, name)) data[i] = Half<name>::narrow(low) | static_cast<u32>(Half<name>::narrow(high)) << 16;
        IRIS_DTYPES_16(IRIS_ROW)
#undef IRIS_ROW
        else IRIS_NO_OTHER_TYPE;
    }
}

#if !IRIS_PORT_CUDA
// MFMA, AMD's matrix instruction, for an element type: number of elements of each factor that a lane passes
// to one instruction, and on a device the type of these operands and the builtins for blocks of 32 x 32 and
// of 16 x 16.
template <u32 CODE> struct MfmaOf;
#if IRIS_HAS_MFMA && IRIS_PORT_HIP
#define IRIS_LANE(count, type) type __attribute__((ext_vector_type(count)))
#define IRIS_MFMA(name, count, type, by_32, by_16)                                                 \
    template <> struct MfmaOf<name> {                                                              \
        enum : u32 { COUNT = count };                                                              \
        using Lane = type;                                                                         \
        template <u32 SIZE, class Sums>                                                            \
        IRIS_DEVICE static void multiply_add(Sums& sums, const Lane& a, const Lane& b) {           \
            if constexpr (SIZE == 32) sums = __builtin_amdgcn_mfma_f32_##by_32(a, b, sums, 0, 0, 0); \
            else sums = __builtin_amdgcn_mfma_f32_##by_16(a, b, sums, 0, 0, 0);                    \
        }                                                                                          \
    };
#else
#define IRIS_MFMA(name, count, type, by_32, by_16)                                                 \
    template <> struct MfmaOf<name> {                                                              \
        enum : u32 { COUNT = count };                                                              \
    };
#endif
IRIS_MFMA(F32, 1, float, 32x32x2f32, 16x16x4f32)
#if IRIS_HAS_MFMA_16
IRIS_MFMA(F16, 8, IRIS_LANE(8, _Float16), 32x32x16_f16, 16x16x32_f16)
IRIS_MFMA(BF16, 8, IRIS_LANE(8, __bf16), 32x32x16_bf16, 16x16x32_bf16)
#else
IRIS_MFMA(F16, 4, IRIS_LANE(4, _Float16), 32x32x8f16, 16x16x16f16)
IRIS_MFMA(BF16, 4, IRIS_LANE(4, short), 32x32x8bf16_1k, 16x16x16bf16_1k)
#endif
#undef IRIS_MFMA
#endif

} // namespace iris

#endif
