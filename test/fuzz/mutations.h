// Mutations of structured inputs, in addition to libFuzzer's mutations of bytes.
#pragma once

#include <optional>
#include <random>
#include <string>
#include <string_view>

using Random = std::minstd_rand;

// Changes one JSON document of the input: one of its parts (see parts_of()) or one line of a part. For safetensors the
// header's length stays correct, and usually the tensors' offsets and data too. nullopt: no document at the chosen
// place.
std::optional<std::string> with_changed_json(std::string_view input, bool is_safetensors, Random& random);

// Removes or adds up to 16 bytes at the end of one part.
std::string with_changed_end(std::string_view input, Random& random);

// Adds a small number to one byte: usually of a length or an offset, in files that are not text.
std::string with_changed_number(std::string_view input, Random& random);
