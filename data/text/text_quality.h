// Counts invalid UTF-8 and suspicious bytes in a text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

struct TextQuality {
    uint64_t bytes = 0;      // bytes of text
    uint64_t invalid = 0;    // bytes that are not UTF-8
    uint64_t multibyte = 0;  // non-ASCII characters
    uint64_t nul = 0;        // zero bytes
    uint64_t dropped = 0;    // bytes without a token; add(text) does not change it

    void add(std::string_view text);  // requires text that begins and ends between characters
    void add(const TextQuality& other);

    // Returns the findings for the text of a file as a message; "" if there are none.
    std::string sentence() const;
};
