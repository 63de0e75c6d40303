// Accesses to memory that is not there become faults of the thread that made them.
#pragma once

#include <signal.h>

namespace simt {

// While it lives. Catch2 has handlers of its own for the time of a test.
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
