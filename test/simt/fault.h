// Faults found by the simulator. A fault is recorded with kernel, block and thread; most faults end the launch.
//
// The next call that waits for the device returns cudaErrorLaunchFailure with the first fault's message, so
// check_cuda() fails the test. A test that plants a fault calls take_faults() instead.
#pragma once

#include <string>
#include <vector>

namespace simt {

struct Fault {
    std::string kernel;  // its name as given to launch(), or empty outside kernels
    std::string place;   // "block (3, 0, 0), thread (17, 0, 0)", or empty
    std::string what;

    std::string sentence() const;
};

// Performs all work that waits on any stream; returns and clears the faults since the last call.
std::vector<Fault> take_faults();

// Records a fault at the running thread (if one runs) and continues.
void note_fault(const std::string& what);

// Records a fault and ends the launch: all its threads are unwound.
[[noreturn]] void fault(const std::string& what);

// Faults that have not been taken yet.
std::vector<Fault>& pending_faults();

}  // namespace simt
