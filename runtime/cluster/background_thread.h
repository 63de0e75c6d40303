// Threads that run next to the trainer.
#pragma once

#include <signal.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "runtime/cluster/socket.h"

// Starts a thread that receives no signals: the trainer's threads handle them.
template <class Body> std::jthread start_thread(Body body) {
    return std::jthread([body = std::move(body)](const std::stop_token& stop) {
        sigset_t all;
        sigfillset(&all);
        ::pthread_sigmask(SIG_SETMASK, &all, nullptr);
        body(stop);
    });
}

// Sleeps. Returns true, without delay, once a stop is requested.
inline bool stops_within(const std::stop_token& stop, double limit_s) {
    std::mutex mutex;
    std::condition_variable_any never;
    std::unique_lock lock(mutex);
    never.wait_for(lock, stop, seconds(limit_s), [] { return false; });
    return stop.stop_requested();
}
