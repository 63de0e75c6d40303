// Files for the tests of data/.
#pragma once

#include <filesystem>
#include <fstream>
#include <string_view>

#include "kernels/base/check.h"

// Creates or replaces a file, without the syncs of write_file_atomically(), because some tests write thousands. The old
// file is removed first, because file systems sync a file that is truncated and rewritten.
inline void write_bytes(const std::string& path, std::string_view bytes) {
    std::filesystem::remove(path);
    std::ofstream(path, std::ios::binary) << bytes;
}

// A text of `count` lines.
inline std::string lines(int count) {
    std::string text;
    for (int i = 0; i < count; i++) text += format("line %d of these %d lines\n", i, count);
    return text;
}
