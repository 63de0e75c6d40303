// What is this file, and is it sound? The part of the inspect command that knows data.
#pragma once

#include <functional>
#include <string>

// Describes a token shard or a tokenizer by calling print(line) for each line without newline. False, and nothing
// printed, if the file is neither. Exit::data, with what is wrong, if it is one and damaged.
bool inspect_data_file(const std::string& path, const std::function<void(const std::string&)>& print);
