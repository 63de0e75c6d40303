// System calls that fail in this process for files whose path contains a text, as a failing disk or a lost file server
// makes them fail.
#pragma once

#include <string>

enum class SystemCall {
    read,
    examine,
    list,
    lock
};  // read() and pread(); stat(); fdopendir(), of std::filesystem; flock()

// As long as the object lives; one at a time.
class SystemFault {
public:
    SystemFault(SystemCall call, std::string path_part, int error_number);
    ~SystemFault();
    SystemFault(const SystemFault&) = delete;

    const SystemCall call;
    const std::string path_part;
    const int error_number;
};
