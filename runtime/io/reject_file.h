// Reports invalid content of a file.
#pragma once

#include "kernels/base/check.h"

// Fails with Exit::data and the message "PATH: ...". `pattern` and `values` are as in printf; %s also accepts a
// std::string.
template <class... Values>
[[noreturn]] void reject_file(const std::string& path, const std::string& pattern, const Values&... values) {
    fail(Exit::data, ("%s: " + pattern).c_str(), path, values...);
}
