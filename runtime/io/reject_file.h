// How invalid content of a file is reported.
#pragma once

#include "kernels/base/check.h"

// Fails with Exit::data and the message "PATH: ..."; `pattern` and `values` as in printf, and %s also takes a
// std::string.
template <class... Values>
[[noreturn]] void reject_file(const std::string& path, const std::string& pattern, const Values&... values) {
    fail(Exit::data, ("%s: " + pattern).c_str(), path, values...);
}
