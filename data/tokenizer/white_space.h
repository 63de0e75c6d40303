// White space as defined by Python's str.isspace(), str.strip() and \s of re, to match Python programs.
#pragma once

#include <cstdint>
#include <string_view>

// Returns the length of the white-space character at the beginning of UTF-8 text; 0 if there is none.
inline size_t white_space_length(std::string_view text) {
    auto byte = [&](size_t i) { return i < text.size() ? uint8_t(text[i]) : 0; };
    const unsigned first = byte(0), second = byte(1), third = byte(2);
    if ((first >= 0x09 && first <= 0x0d) || (first >= 0x1c && first <= 0x20)) return 1;
    if (first == 0xc2) return second == 0x85 || second == 0xa0 ? 2 : 0;
    const unsigned last_two = second << 8 | third;
    const bool is_space = (first == 0xe1 && last_two == 0x9a80) || (first == 0xe3 && last_two == 0x8080) ||
                          (first == 0xe2 && ((last_two >= 0x8080 && last_two <= 0x808a) || last_two == 0x80a8 ||
                                             last_two == 0x80a9 || last_two == 0x80af || last_two == 0x819f));
    return is_space ? 3 : 0;
}

inline std::string_view right_stripped(std::string_view text) {
    size_t end = 0;  // end of the last character that is not white space
    for (size_t at = 0, length; at < text.size(); at += length ? length : 1) {
        length = white_space_length(text.substr(at));
        if (length == 0) end = at + 1;
    }
    return text.substr(0, end);
}

inline std::string_view stripped(std::string_view text) {
    while (const size_t length = white_space_length(text)) text.remove_prefix(length);
    return right_stripped(text);
}
