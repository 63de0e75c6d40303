// How an input reaches a parser that takes paths.
#pragma once

#include <string_view>
#include <vector>

#include "test/support/temporary_directory.h"

// The path of a file in memory with this content, valid until the next call.
std::string path_of(std::string_view content);

// The directory that directories of inputs are made in; one for the whole process.
const TemporaryDirectory& scratch_directory();

// Makes or replaces scratch_directory()/NAME; returns its path.
std::string scratch_file(const std::string& name, std::string_view content);

// `count` parts with a NUL between them; the last takes the rest, and missing ones are empty.
std::vector<std::string_view> parts_of(std::string_view input, size_t count);
