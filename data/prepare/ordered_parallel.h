// Processes a sequence of items on several threads and delivers the results in order.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <future>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/base/check.h"

// Calls produce(In&) and consume(result) in this thread, in item order, until produce() returns false. `threads` other
// threads call work(const In&), which returns the result; each thread gets its own `work` from make_worker(). Holds a
// few items per thread. The first exception stops all threads and is rethrown. Fails with Exit::os if a thread cannot
// be started.
template <class In, class Produce, class MakeWorker, class Consume>
void ordered_parallel(int threads, const Produce& produce, const MakeWorker& make_worker, const Consume& consume) {
    using Worker = std::invoke_result_t<MakeWorker>;
    using Out = std::invoke_result_t<Worker&, const In&>;
    std::mutex mutex;
    std::condition_variable work_is_there;
    std::deque<std::packaged_task<Out(Worker&)>> waiting;
    std::deque<std::future<Out>> in_order;
    bool is_over = false;

    auto run_worker = [&] {
        Worker work = make_worker();
        for (;;) {
            std::unique_lock lock(mutex);
            work_is_there.wait(lock, [&] { return is_over || !waiting.empty(); });
            if (waiting.empty()) return;
            auto job = std::move(waiting.front());
            waiting.pop_front();
            lock.unlock();
            job(work);
        }
    };
    auto consume_first = [&] {
        std::future<Out> first = std::move(in_order.front());
        in_order.pop_front();
        consume(first.get());
    };
    auto first_is_done = [&] {
        return in_order.front().wait_for(std::chrono::seconds(0)) == std::future_status::ready;
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
    for (In item; produce(item); item = In()) {
        std::packaged_task<Out(Worker&)> job([in = std::move(item)](Worker& work) { return work(in); });
        in_order.push_back(job.get_future());
        {
            const std::lock_guard lock(mutex);
            waiting.push_back(std::move(job));
        }
        work_is_there.notify_one();
        while (in_order.size() >= most || (!in_order.empty() && first_is_done())) consume_first();
    }
    while (!in_order.empty()) consume_first();
}
