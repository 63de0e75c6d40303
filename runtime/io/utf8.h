#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

// Bytes of the UTF-8 character at the beginning of `text`; 0 if it is not a valid one. Requires a `text` that is not
// empty. Overlong forms, surrogates and code points above U+10FFFF are invalid (RFC 3629).
inline size_t utf8_length(std::string_view text) {
    const uint8_t first = uint8_t(text[0]);
    if (first < 0x80) return 1;
    const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
    for (size_t i = 1; i < length; i++)
        if ((uint8_t(text[i]) & 0xc0) != 0x80) return 0;
    const uint8_t second = uint8_t(text[1]);
    const bool is_overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
    const bool is_surrogate = first == 0xed && second >= 0xa0, is_too_large = first == 0xf4 && second >= 0x90;
    return is_overlong || is_surrogate || is_too_large ? 0 : length;
}
