// The files that the arguments of prepare mean.
#pragma once

#include "runtime/io/io.h"

struct InputPaths {
    std::vector<std::string> files;
    std::vector<std::string> remarks;  // about files of directories that were passed over, for the user
};

// Replaces directories by the files in them whose names end like those of text, at any depth, sorted by path; hidden
// ones and what is in `out`, where the data set goes, are passed over. "-" stays. Fails with Exit::no_input for a path
// that does not exist and a directory without such a file.
InputPaths expand_inputs(const std::vector<std::string>& paths, const std::string& out);

// Copies standard input to a new file. Fails with Exit::no_input if it is a terminal.
void copy_stdin(const std::string& path, const std::function<void(uint64_t bytes)>& advance);
