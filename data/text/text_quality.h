// What of a text is not UTF-8, or looks like a mistake.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

struct TextQuality {
    uint64_t bytes = 0;      // of the text
    uint64_t invalid = 0;    // of them that belong to no character
    uint64_t multibyte = 0;  // characters beyond ASCII
    uint64_t nul = 0;        // zero bytes
    uint64_t dropped = 0;    // bytes that have no token; add(text) leaves it as it is

    void add(std::string_view text);  // which begins and ends between characters
    void add(const TextQuality& other);

    // A sentence about each finding, for the text of a file; "" if there is none.
    std::string sentence() const;
};
