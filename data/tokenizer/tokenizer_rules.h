// The rules of a tokenizer.json.
#pragma once

#include <nlohmann/json.hpp>

#include "data/tokenizer/text_rules.h"

// Reads everything but vocabulary and merges. `file` is its text. Fails with Exit::data, naming `path` and the part, if
// a part would change the ids and is not supported.
TextRules read_text_rules(const nlohmann::ordered_json& json, std::string_view file, const std::string& path);

// The value at a JSON pointer; null if there is none.
const nlohmann::ordered_json& find(const nlohmann::ordered_json& json, const std::string& pointer);
