// Turns accesses to unmapped memory into faults of the thread that made them.
#pragma once

#include <signal.h>

namespace simt {

// Active during its lifetime. Catch2 has its own handlers while a test runs.
class MemoryFaultHandler {
public:
    MemoryFaultHandler();
    ~MemoryFaultHandler();
    MemoryFaultHandler(const MemoryFaultHandler&) = delete;
    MemoryFaultHandler& operator=(const MemoryFaultHandler&) = delete;

private:
    struct sigaction before_[2];
};

}  // namespace simt
