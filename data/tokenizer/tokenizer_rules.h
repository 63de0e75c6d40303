// Reads the rules of a tokenizer.json.
#pragma once

#include <nlohmann/json.hpp>

#include "data/tokenizer/text_rules.h"

// Reads all parts except vocabulary and merges. `file` is the text of the file. Fails with Exit::data, naming `path`
// and the part, if an unsupported part would change the ids.
TextRules read_text_rules(const nlohmann::ordered_json& json, std::string_view file, const std::string& path);

// Returns the value at a JSON pointer; null if there is none.
const nlohmann::ordered_json& find(const nlohmann::ordered_json& json, const std::string& pointer);
