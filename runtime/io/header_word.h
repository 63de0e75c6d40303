// Headers of binary files that consist of 32-bit words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

// The little-endian int32 at byte 4 * `index` of a file that begins with `bytes`; 0 beyond its end.
inline int32_t header_word(std::string_view bytes, size_t index) {
    int32_t word = 0;
    if (bytes.size() >= 4 * (index + 1)) std::memcpy(&word, bytes.data() + 4 * index, 4);
    return word;
}
