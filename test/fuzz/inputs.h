// Passes an input to a parser that takes paths.
#pragma once

#include <string_view>
#include <vector>

#include "test/support/temporary_directory.h"

// The path of an in-memory file with this content, valid until the next call.
std::string path_of(std::string_view content);

// The directory for directories of inputs; one for the whole process.
const TemporaryDirectory& scratch_directory();

// Creates or replaces scratch_directory()/NAME and returns its path.
std::string scratch_file(const std::string& name, std::string_view content);

// `count` parts separated by NUL; the last one contains the rest, and missing ones are empty.
std::vector<std::string_view> parts_of(std::string_view input, size_t count);
