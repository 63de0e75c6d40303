// Parsing of JSON within limits.
#pragma once

#include <cstddef>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/base/check.h"  // IWYU pragma: export

struct JsonLimits {
    size_t max_depth = 64;
    size_t max_values = 50'000'000;
};

// Parses one JSON text strictly. Fails with `code`, naming `origin` (such as a file path), line and column, for syntax
// errors, duplicate keys, invalid UTF-8, numbers outside double's range (1e400) and exceeded limits.
nlohmann::ordered_json parse_json(std::string_view text, const std::string& origin, Exit code, JsonLimits limits = {});

// Like parse_json(), but returns null if the text is invalid. The library's own parser does not limit the depth, so
// copying or printing its result can overflow the stack.
nlohmann::ordered_json parse_json_or_null(std::string_view text);

// The numbers and strings of a JSON object by key, for files that need no other values: <nlohmann/json.hpp> takes
// seconds to compile. Empty if the text is not a valid object.
struct JsonRecord {
    std::map<std::string, double> numbers;
    std::map<std::string, std::string> texts;

    double number(const std::string& key) const;     // NaN if there is none
    std::string text(const std::string& key) const;  // "" if there is none
};
JsonRecord parse_record(std::string_view text);

// A value for error messages: JSON in plain ASCII, truncated if it is long.
std::string printed(const nlohmann::ordered_json& value);
std::string printed(const std::string& text);

// The text of a JSON object with these members. Bytes that are not UTF-8 become U+FFFD.
using JsonMember = std::pair<const char*, std::variant<int64_t, double, std::string>>;
std::string json_object(const std::vector<JsonMember>& members);

// The text as a JSON string. Bytes that are not UTF-8 become U+FFFD.
std::string quoted(const std::string& text);

// Replaces bytes that are not UTF-8 by U+FFFD.
std::string valid_utf8(const std::string& text);
