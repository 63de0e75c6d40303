// Tensor maps and swizzles in the view of the asynchronous units.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ptx {

enum Swizzle { SWIZZLE_NONE = 0, SWIZZLE_128 = 1, SWIZZLE_64 = 2, SWIZZLE_32 = 3 };  // as in a wgmma descriptor

// The XOR acts on bits of the shared address itself, for TMA and wgmma alike: the 16-byte chunk (bits 4 to 6) is XORed
// with the number of the 128-byte row (bits 7 to 9).
inline uint32_t swizzled(uint32_t address, int mode) {
    const uint32_t rows = mode == SWIZZLE_128 ? 7 : mode == SWIZZLE_64 ? 3 : mode == SWIZZLE_32 ? 1 : 0;
    return address ^ (address >> 7 & rows) << 4;
}

// Up to five dimensions, the innermost first. Stored in the bytes of a CUtensorMap.
struct TensorMap {
    static constexpr uint8_t kMagic = 0x5a;

    char* base;
    uint64_t stride[5];  // in bytes
    uint32_t size[5];    // in elements
    uint16_t box[5];     // in elements, what one copy moves
    uint8_t rank, element_bytes, swizzle, magic;
    uint8_t zeros[6];  // no padding, which could contain old addresses

    size_t box_bytes() const {
        size_t bytes = element_bytes;
        for (uint16_t extent : box) bytes *= extent;
        return bytes;
    }
};

// False for arguments that cuTensorMapEncodeTiled rejects. `strides` excludes the first dimension.
inline bool make_tensor_map(void* out, int element_bytes, int rank, void* base, const uint64_t* size,
                            const uint64_t* strides, const uint32_t* box, int swizzle) {
    TensorMap map{};
    map.base = static_cast<char*>(base);
    map.rank = uint8_t(rank);
    map.element_bytes = uint8_t(element_bytes);
    map.swizzle = uint8_t(swizzle);
    map.magic = TensorMap::kMagic;
    map.stride[0] = uint64_t(element_bytes);
    const uint64_t span[] = {UINT64_MAX, 128, 64, 32}, row_bytes = box[0] * uint64_t(element_bytes);
    bool good = rank >= 1 && rank <= 5 && reinterpret_cast<uintptr_t>(base) % 16 == 0 && row_bytes % 16 == 0 &&
                row_bytes <= span[swizzle];
    for (int i = 0; i < 5; i++) {
        map.size[i] = i < rank ? uint32_t(size[i]) : 1;
        map.box[i] = i < rank ? uint16_t(box[i]) : 1;
        good = good && map.box[i] >= 1 && map.box[i] <= 256;
    }
    for (int i = 1; i < rank; i++) {
        map.stride[i] = strides[i - 1];
        good = good && map.stride[i] % 16 == 0;
    }
    std::memcpy(out, &map, sizeof map);
    return good;
}

// Calls piece(offset, address, valid) for every 16 bytes of the box at the given coordinates: the offset in the box
// without swizzle, the address in global memory, and which of its elements are inside the tensor.
template <class Piece> void each_piece(const TensorMap& map, const int* at, Piece piece) {
    const int row_bytes = map.box[0] * map.element_bytes, elements = 16 / map.element_bytes;
    uint32_t offset = 0;
    for (int e = 0; e < map.box[4]; e++)
        for (int d = 0; d < map.box[3]; d++)
            for (int c = 0; c < map.box[2]; c++)
                for (int b = 0; b < map.box[1]; b++) {
                    const int64_t x[5] = {at[0], at[1] + b, at[2] + c, at[3] + d, at[4] + e};
                    int64_t from = 0;
                    bool is_inside = true;
                    for (int i = 1; i < 5; i++) {
                        is_inside = is_inside && x[i] >= 0 && x[i] < map.size[i];
                        from += x[i] * int64_t(map.stride[i]);
                    }
                    for (int j = 0; j < row_bytes; j += 16, offset += 16) {
                        const int64_t first = at[0] + j / map.element_bytes;
                        unsigned valid = 0;
                        for (int k = 0; k < elements; k++)
                            if (is_inside && first + k >= 0 && first + k < map.size[0]) valid |= 1u << k;
                        piece(offset, map.base + from + first * map.element_bytes, valid);
                    }
                }
}

}  // namespace ptx
