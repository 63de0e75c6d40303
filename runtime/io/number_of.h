// Reads a number that is a whole text.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>

// Returns the number if all of `text` is one.
template <class Number> std::optional<Number> number_of(std::string_view text) {
    Number value = 0;
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, value);
    return error == std::errc() && rest == end ? std::optional(value) : std::nullopt;
}
