// The inspect command for data files.
#pragma once

#include <functional>
#include <string>

// Describes a token shard or a tokenizer by calling print(line) for each line, without newline. Returns false, without
// printing, if the file is neither. Fails with Exit::data if the file is one of them and damaged.
bool inspect_data_file(const std::string& path, const std::function<void(const std::string&)>& print);
