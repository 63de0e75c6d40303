// Startup checks: the requirements for using a GPU.
#pragma once

#include <string>

// Results of CUDA queries. Versions are 1000 major + 10 minor.
struct StartupFacts {
    int driver_version = 0;   // newest CUDA version that the driver supports; 0 without a driver
    int toolkit_version = 0;  // CUDA version of the build
    int device_count = 0;
    std::string count_error;   // why devices could not be counted, or empty
    std::string device_name;   // of the current device
    int major = 0, minor = 0;  // compute capability of the device
    std::string code_error;    // why the program's kernels cannot run on it, or empty
};

// Fails with Exit::os and instructions for the user if a requirement is not met.
void check_startup(const StartupFacts& facts);

// Selects this process's GPU; GPU 0 if the launcher makes only one visible per rank. Fails with Exit::config if there
// are several, but not that many.
void select_gpu(int local_rank);

// The PCI bus id of the current device.
std::string current_bus_id();

// Runs check_startup() for this process. device_info() and device_alloc() call it once.
void require_usable_device();
