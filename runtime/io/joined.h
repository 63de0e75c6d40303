// Lists in messages and files.
#pragma once

#include <functional>
#include <string>
#include <type_traits>

// Joins the items of a list. `part_of`, a function or a member, returns an item's text or number.
template <class List, class PartOf = std::identity>
std::string joined(List&& list, const char* separator = ", ", const PartOf& part_of = {}) {
    std::string text;
    for (const auto& item : list) {
        const auto& part = std::invoke(part_of, item);
        if (!text.empty()) text += separator;
        if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(part)>>)
            text += std::to_string(part);
        else
            text += part;
    }
    return text;
}
