// The requirements for using a GPU, and their check at the start.
#pragma once

#include <string>

// Results of CUDA's queries. Versions are 1000 major + 10 minor.
struct StartupFacts {
    int driver_version = 0;   // newest CUDA that the driver supports, 0 without a driver
    int toolkit_version = 0;  // CUDA that this program was built with
    int device_count = 0;
    std::string count_error;   // why devices could not be counted, else empty
    std::string device_name;   // of the current device
    int major = 0, minor = 0;  // its compute capability
    std::string code_error;    // why the program's kernels cannot run on it, else empty
};

// Fails with Exit::os and instructions for the user if something is missing.
void check_startup(const StartupFacts& facts);

// check_startup on the facts of this process. device_info() and device_alloc() do it once.
void require_usable_device();
