// Waiting for a communication library whose calls do not block.
#pragma once

#include <chrono>
#include <thread>

// Polls until `is_done`, at first `eager_polls` times without sleeping because most waits are short. Returns false on
// timeout.
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
