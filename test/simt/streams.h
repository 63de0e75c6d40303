// Streams and events: work is queued and executed late, when the host waits for it or an event forces it, and streams
// overtake each other as much as events allow. So a missing wait shows, and so does a host buffer that is reused early.
// While the host waits for another process, all streams advance.
// The null stream is CUDA's legacy stream: its work waits for earlier work of blocking streams, and their later work
// waits for it.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

namespace simt {

struct Event;
struct Stream;

// The first `count` work items of a stream.
struct Mark {
    Stream* stream;
    size_t count;
};

struct Work {
    std::function<void()> run;        // or null
    std::function<bool()> poll = {};  // or null: called until it returns true
    Event* recorded = nullptr;        // complete `version` of this event
    Event* awaited = nullptr;         // or wait for that version
    unsigned version = 0;
    std::vector<Mark> earlier{};         // dependencies between the legacy stream and others
    std::shared_ptr<char> host_order{};  // the host's actions before it queued this
};

struct Stream {
    std::deque<Work> queue;
    bool is_blocking = true;
    size_t done = 0;       // work items
    void* tsan = nullptr;  // its order of events, a fiber of the race detector
    char done_order = 0;
};

// Work that was recorded instead of carried out.
struct Graph {
    std::vector<std::function<void()>> work;
    bool is_valid = true;
};

// The capture in progress. Stricter than a GPU: work may not wait for events, record them, or copy from or to the host.
struct Capture {
    Stream* stream = nullptr;  // null: none
    std::unique_ptr<Graph> graph;
};
Capture& capture();

struct Event {
    unsigned recorded = 0, completed = 0;
    Stream* stream = nullptr;  // the last stream that recorded it
    char order = 0;
    double ms = 0;  // simulated time of completion
};

Stream* default_stream();
Stream* create_stream(bool is_blocking);
void destroy_stream(Stream* stream);

void queue_work(Stream* stream, std::function<void()> run);
// Work that may wait for other processes: poll() returns false while it does.
void queue_poll(Stream* stream, std::function<bool()> poll);
void queue_record(Stream* stream, Event* event);
void queue_wait(Stream* stream, Event* event);

// Executes the stream's queued work, and the work that it waits for.
void run_stream(Stream* stream);
void run_until_complete(Event* event);
void run_all_streams();
// One work item, unless another process's work must come first.
void go_on_towards(Event* event);

// Adds `ms` milliseconds to the running work's simulated time, in addition to its one microsecond.
void spend(double ms);

}  // namespace simt
