// Shared by the implementations of kernels/comm.h.
#pragma once

#include <chrono>
#include <thread>

#include "kernels/base/check.h"
#include "kernels/comm.h"

// The ticket of a single rank's collective.
inline Ticket finished_in_place(const void* out, const void* inp, const char* name) {
    require(out == inp, "%s: must be in place with one rank", name);
    return {};
}

// Waits for a library whose calls do not block: polls until `is_done`, at first `eager_polls` times without sleeping,
// because most waits are short. Returns false on timeout.
template <class Condition> bool poll_until(double limit_s, int eager_polls, Condition is_done) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit_s);
    for (int polls = 0; !is_done(); polls++) {
        if (std::chrono::steady_clock::now() >= end) return false;
        if (polls < eager_polls)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
}
