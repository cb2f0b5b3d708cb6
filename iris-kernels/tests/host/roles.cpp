// Program that uses one function of dtype.h with the type code of its second argument; the first one
// is the function's number. Exits with 0 if the function returns, and with 2 if there is no such number.
#include <cstdlib>

#include "iris/dtype.h"

using namespace iris;

int main(int, char** arguments) {
    const auto dtype = static_cast<u32>(std::atoi(arguments[2]));
    alignas(16) static unsigned char memory[64] = {};
    const auto address = reinterpret_cast<u64>(memory);
    volatile u32 result = 0;
    u32 data[2] = {};
    switch (std::atoi(arguments[1])) {
        case 0: result = element_bytes(dtype); break;
        case 1: result = item_elements(dtype); break;
        case 2: result = static_cast<u32>(rounded(dtype, 1.0f)); break;
        case 3: result = static_cast<u32>(load_element(address, dtype)); break;
        case 4: store_element(address, dtype, 1.0f); break;
        case 5: result = load_bits(address, dtype); break;
        case 6: result = bits_of(dtype, 1.0f); break;
        case 7: store_bits(address, dtype, 1); break;
        case 8: result = load_raw(address, dtype).low.word[0]; break;
        case 9: result = static_cast<u32>(values_of(Raw{}, dtype).v[0]); break;
        case 10: store_whole(address, dtype, Values{}); break;
        case 11: result = static_cast<u32>(unpack_item(dtype, data).v[0]); break;
        case 12: pack_item(dtype, ItemValues{}, data); break;
        default: return 2;
    }
    return static_cast<int>(result & 0);
}
