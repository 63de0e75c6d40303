// Processes a sequence of items on several threads and delivers the results in order.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/base/check.h"

// Calls produce(In&) and consume(Out&) in this thread, in item order, until produce() returns false. `threads` other
// threads call work(In&, Out&); each thread gets its own `work` from make_worker(). Holds a few items per thread. The
// first exception stops all threads and is rethrown. Fails with Exit::os if a thread cannot be started.
template <class In, class Out, class Produce, class MakeWorker, class Consume>
void ordered_parallel(int threads, const Produce& produce, const MakeWorker& make_worker, const Consume& consume) {
    struct Job {
        In in;
        Out out;
        std::exception_ptr error;
        bool is_done = false;
    };
    std::mutex mutex;
    std::condition_variable work_is_there, job_is_done;
    std::deque<std::shared_ptr<Job>> waiting, in_order;
    bool is_over = false;

    auto run_worker = [&] {
        auto work = make_worker();
        for (;;) {
            std::shared_ptr<Job> job;
            {
                std::unique_lock lock(mutex);
                work_is_there.wait(lock, [&] { return is_over || !waiting.empty(); });
                if (waiting.empty()) return;
                job = std::move(waiting.front());
                waiting.pop_front();
            }
            try {
                work(job->in, job->out);
            } catch (...) {
                job->error = std::current_exception();
            }
            {
                const std::lock_guard lock(mutex);
                job->is_done = true;
            }
            job_is_done.notify_one();
        }
    };
    auto consume_first = [&] {
        const std::shared_ptr<Job> job = std::move(in_order.front());
        in_order.pop_front();
        {
            std::unique_lock lock(mutex);
            job_is_done.wait(lock, [&] { return job->is_done; });
        }
        if (job->error) std::rethrow_exception(job->error);
        consume(job->out);
    };
    auto first_is_done = [&] {
        const std::lock_guard lock(mutex);
        return in_order.front()->is_done;
    };

    std::vector<std::thread> workers;
    auto end = [&] {
        {
            const std::lock_guard lock(mutex);
            is_over = true;
            if (std::uncaught_exceptions() > 0) waiting.clear();
        }
        work_is_there.notify_all();
        for (std::thread& worker : workers) worker.join();
    };
    struct AtEnd {
        decltype(end)& call;
        ~AtEnd() { call(); }
    } at_end{end};

    try {
        for (int i = 0; i < threads; i++) workers.emplace_back(run_worker);
    } catch (const std::system_error& error) {
        fail(Exit::os, "cannot start %d threads: %s", threads, error.what());
    }
    const size_t most = size_t(threads) * 3 + 1;
    for (auto job = std::make_shared<Job>(); produce(job->in); job = std::make_shared<Job>()) {
        {
            const std::lock_guard lock(mutex);
            waiting.push_back(job);
        }
        in_order.push_back(std::move(job));
        work_is_there.notify_one();
        while (in_order.size() >= most || (!in_order.empty() && first_is_done())) consume_first();
    }
    while (!in_order.empty()) consume_first();
}
