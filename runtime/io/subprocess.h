// A program that runs in the background.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "runtime/io/files.h"

// Starts a program without input, in its own process group, and collects its output. Killed if the object is destroyed
// before the program has ended. Works in a process with several threads.
class Subprocess {
public:
    // Fails with Exit::os if the program cannot be started.
    explicit Subprocess(std::vector<std::string> command);
    ~Subprocess();
    Subprocess(const Subprocess&) = delete;
    Subprocess& operator=(const Subprocess&) = delete;

    struct Result {
        std::string output;       // standard output and standard error
        std::optional<int> code;  // exit code, or 128 + signal; none if the program did not end in time
    };
    // Waits for the end of the program, at most until `limit_s` after its start. Then kills everything that is left of
    // it. Call once.
    Result wait(double limit_s);

private:
    pid_t pid_ = 0;
    FileDescriptor output_;
    double start_ms_ = 0;
};
