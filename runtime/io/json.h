// JSON text into nlohmann::ordered_json, strictly, with sentences for what is wrong.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "kernels/check.h"

struct JsonLimits {
    size_t max_depth = 64;
    size_t max_values = 50'000'000;
};

// Parses one JSON text. Errors name `origin` (a file's path, say) with line and column and exit with `code`: syntax, a
// key that stands twice in one object, invalid UTF-8, a number outside double's range (1e400), nesting beyond the
// limit.
nlohmann::ordered_json parse_json(std::string_view text, const std::string& origin, Exit code, JsonLimits limits = {});
