// Streams and events: work is queued and carried out late, when someone waits for it or an event forces it, and streams
// overtake each other as far as events allow. So a missing wait shows, and so does a host buffer that is reused early.
// The null stream is CUDA's legacy stream: what is queued there waits for what blocking streams have been given before,
// and they wait for it.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

namespace simt {

struct Event;
struct Stream;

// The first `count` pieces of work of a stream.
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
    std::vector<Mark> earlier{};         // what the legacy stream waits for, and what waits for it
    std::shared_ptr<char> host_order{};  // what the host did before it queued this
};

struct Stream {
    std::deque<Work> queue;
    bool is_blocking = true;
    size_t done = 0;       // pieces of work
    void* tsan = nullptr;  // its order of events, a fiber of the race detector
    char done_order = 0;
};

struct Event {
    unsigned recorded = 0, completed = 0;
    Stream* stream = nullptr;  // where it was recorded last
    char order = 0;
    double ms = 0;  // by the made-up clock, when it was completed
};

Stream* default_stream();
Stream* create_stream(bool is_blocking);
void destroy_stream(Stream* stream);

void queue_work(Stream* stream, std::function<void()> run);
// Work that may wait for other processes: false where it does.
void queue_poll(Stream* stream, std::function<bool()> poll);
void queue_record(Stream* stream, Event* event);
void queue_wait(Stream* stream, Event* event);

// Carries out what is queued there, and what that waits for.
void run_stream(Stream* stream);
void run_until_complete(Event* event);
void run_all_streams();
// One piece of work, if none of another process must come first.
void go_on_towards(Event* event);

// Lets the work that runs take `ms` milliseconds by the made-up clock that events read, beside its one microsecond.
void spend(double ms);

}  // namespace simt
