// What the simulator finds wrong. A fault is recorded with kernel, block and thread; most of them end the launch.
//
// The next call that waits for the device returns cudaErrorLaunchFailure with the first fault's sentence as its text,
// so check_cuda() fails the test. A test that plants a fault asks for it with take_faults() instead.
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

// Carries out all work that waits on any stream; returns the faults since the last time and forgets them.
std::vector<Fault> take_faults();

// Records a fault at the running thread (if one runs) and goes on.
void note_fault(const std::string& what);

// Records a fault and ends the launch: all its threads are unwound.
[[noreturn]] void fault(const std::string& what);

// Faults that nobody has asked for yet.
std::vector<Fault>& pending_faults();

}  // namespace simt
