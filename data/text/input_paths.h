// Expands the input arguments of prepare to files.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

struct InputPaths {
    std::vector<std::string> files;
    std::vector<std::string> warnings;  // messages to the user about skipped files
};

// Replaces each directory with its text files (by name), found recursively and sorted by path. Skips hidden files and
// the output directory `out`. Keeps "-". Fails with Exit::no_input if a directory cannot be listed or has no text
// files, and with Exit::usage if "-" occurs twice.
InputPaths expand_inputs(const std::vector<std::string>& paths, const std::string& out);

// Copies standard input to a new file. Fails with Exit::no_input if it is a terminal.
void copy_stdin(const std::string& path, const std::function<void(uint64_t bytes)>& advance);
