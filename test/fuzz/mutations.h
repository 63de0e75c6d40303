// Mutations of inputs that have a structure, besides those of bytes that libFuzzer makes.
#pragma once

#include <optional>
#include <random>
#include <string>
#include <string_view>

using Random = std::minstd_rand;

// Changes one JSON document of the input: one of its parts (see parts_of()) or one line of a part. With safetensors the
// length of the header stays right, and mostly the offsets and the bytes of the tensors too. nullopt: there is no
// document where it looked.
std::optional<std::string> with_changed_json(std::string_view input, bool is_safetensors, Random& random);

// Cuts one part at its end, or lengthens it there, by 16 bytes at most.
std::string with_changed_end(std::string_view input, Random& random);

// Adds a small number to one byte: mostly to a length or an offset, in files that are not text.
std::string with_changed_number(std::string_view input, Random& random);
