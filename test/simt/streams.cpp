#include "test/simt/streams.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "kernels/base/check.h"
#include "test/simt/options.h"
#include "test/simt/sanitizers.h"

namespace simt {

namespace {

constexpr double kWorkMs = 1e-3;

double& clock_ms() {
    static double ms = 0;
    return ms;
}

std::vector<std::unique_ptr<Stream>>& streams() {
    static std::vector<std::unique_ptr<Stream>> instance;
    return instance;
}

Stream* add_stream() {
    streams().push_back(std::make_unique<Stream>());
    return streams().back().get();
}

// Runs `work` in the stream's order of the race detector, with checking.
template <class Action> void in_order_of(Stream& stream, Action work) {
    if (!tsan()) return work();
    if (!stream.tsan) stream.tsan = __tsan_create_fiber(0);
    void* back = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(stream.tsan, 1);
    work();
    __tsan_switch_to_fiber(back, 1);
}

// Whether the stream is captured, and takes the work.
bool is_captured(Stream* stream, const Work& work) {
    if (stream != capture().stream) return false;
    if (work.run)
        capture().graph->work.push_back(work.run);
    else
        capture().graph->is_valid = false;
    return true;
}

void queue(Stream* stream, Work work) {
    if (is_captured(stream, work)) return;
    work.host_order = std::make_shared<char>();
    release_order(work.host_order.get());
    for (const auto& other : streams())
        if (stream != other.get() && stream->is_blocking && other->is_blocking && !other->queue.empty() &&
            (stream == default_stream() || other.get() == default_stream()))
            work.earlier.push_back({other.get(), other->done + other->queue.size()});
    stream->queue.push_back(std::move(work));
}

// The stream that must advance before this one can; null if there is none.
Stream* blocked_by(const Stream& stream) {
    const Work& work = stream.queue.front();
    if (work.awaited && work.awaited->completed < work.version) return work.awaited->stream;
    for (const Mark& mark : work.earlier)
        if (mark.stream->done < mark.count) return mark.stream;
    return nullptr;
}

// False if the work waits for another process.
bool run_front(Stream& stream) {
    if (Work& front = stream.queue.front(); front.poll) {
        bool is_done = false;
        in_order_of(stream, [&] {
            acquire_order(front.host_order.get());
            is_done = front.poll();
            if (is_done) spend(kWorkMs);
        });
        if (!is_done) return false;
    }
    Work work;
    {
        Quiet quiet;
        work = std::move(stream.queue.front());
        stream.queue.pop_front();
    }
    in_order_of(stream, [&] {
        acquire_order(work.host_order.get());
        if (work.awaited) acquire_order(&work.awaited->order);
        for (const Mark& mark : work.earlier) acquire_order(&mark.stream->done_order);
        if (work.run) {
            spend(kWorkMs);
            work.run();
        }
        if (work.recorded) {
            release_order(&work.recorded->order);
            work.recorded->completed = std::max(work.recorded->completed, work.version);
            work.recorded->ms = clock_ms();
        }
        release_order(&stream.done_order);
        Quiet quiet;
        work = {};
    });
    stream.done++;
    return true;
}

// One step towards the end of the stream: its first work, or the first work of a stream that it waits for. False if
// that waits for another process.
bool step(Stream& stream) {
    Stream* next = &stream;
    for (size_t hops = 0; Stream* other = blocked_by(*next); hops++) {
        next = other;
        require(!next->queue.empty() && hops <= streams().size(), "simt: streams wait for each other in a ring");
    }
    return run_front(*next);
}

// One work item of every stream that can advance. False if there is none.
bool step_of_all() {
    bool advances = false;
    for (const auto& stream : streams())
        if (!stream->queue.empty() && !blocked_by(*stream)) advances |= run_front(*stream);
    return advances;
}

// Blocks the host until the step can be made. Meanwhile the other streams advance: another process may wait for them.
void step_at_last(Stream& stream) {
    while (!step(stream))
        if (!step_of_all()) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

// With a seed, other streams advance by chance.
void step_of_another() {
    if (!options().seed || random_below(2)) return;
    Stream& other = *streams()[random_below(uint32_t(streams().size()))];
    if (!other.queue.empty() && !blocked_by(other)) run_front(other);
}

}  // namespace

Capture& capture() {
    static Capture instance;
    return instance;
}

Stream* default_stream() {
    static Stream* const stream = add_stream();
    return stream;
}

Stream* create_stream(bool is_blocking) {
    default_stream();
    Stream* stream = add_stream();
    stream->is_blocking = is_blocking;
    return stream;
}

void destroy_stream(Stream* stream) {
    run_stream(stream);
    for (const auto& other : streams())
        for (Work& work : other->queue)
            if (std::erase_if(work.earlier, [&](const Mark& mark) { return mark.stream == stream; }))
                release_order(work.host_order.get());  // the host has waited for the stream
    std::erase_if(streams(), [&](const auto& owned) { return owned.get() == stream; });
}

void queue_work(Stream* stream, std::function<void()> run) { queue(stream, {.run = std::move(run)}); }

void queue_poll(Stream* stream, std::function<bool()> poll) { queue(stream, {.run = {}, .poll = std::move(poll)}); }

void queue_record(Stream* stream, Event* event) {
    if (is_captured(stream, {.run = {}})) return;
    event->stream = stream;
    queue(stream, {.run = {}, .recorded = event, .version = ++event->recorded});
}

void queue_wait(Stream* stream, Event* event) {
    if (event->recorded) queue(stream, {.run = {}, .awaited = event, .version = event->recorded});
}

void run_stream(Stream* stream) {
    while (!stream->queue.empty()) {
        step_of_another();
        if (!stream->queue.empty()) step_at_last(*stream);
    }
    acquire_order(&stream->done_order);
}

void run_until_complete(Event* event) {
    while (event->completed < event->recorded) {
        step_of_another();
        if (event->completed < event->recorded) step_at_last(*event->stream);
    }
    acquire_order(&event->order);
}

void go_on_towards(Event* event) {
    step_of_another();
    if (event->completed < event->recorded && !step(*event->stream)) step_of_all();
}

void run_all_streams() {
    for (size_t i = streams().size(); i-- > 0;) run_stream(streams()[i].get());
}

void spend(double ms) { clock_ms() += ms; }

}  // namespace simt
