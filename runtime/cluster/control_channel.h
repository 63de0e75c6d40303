// By which ranks compare what they are, and learn at once when one of them dies or hangs: a star of TCP connections to
// rank 0, beside the network that carries tensors and independent of it.
//
//     ControlChannel control(find_place());
//     control.require_same(digest, "configuration");
//     for (...) control.note_step(step), ...
//     control.leave();
//
// A thread per rank reports every second and listens; it takes no lock that the trainer holds. When a rank dies, hangs
// or leaves with an error, the thread of every other rank prints one sentence on stderr that names the rank, its host
// and pid, what happened, its phase, step and last collective, and ends the process by _exit: with Exit::peer_lost
// (76), or with Exit::hang (80), also on the rank that hangs if it still can. No rank tries to save by then: a
// collective save cannot work. A rank that was asked to stop by a signal is not dead; it goes on until it leaves.
//
// When a whole run was stopped and continued (SIGSTOP to all, a frozen machine), nobody is blamed.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/check.h"
#include "runtime/cluster/place.h"
#include "runtime/cluster/rendezvous.h"
#include "runtime/cluster/watch.h"

struct ControlSettings {
    OpeningSettings opening;
    WatchSettings watch;
    double answer_s = 300;  // all_gather() and its like: by then all ranks must have asked the same
    double leave_s = 1800;  // leave(): by then all ranks must have called it
};

class Watcher;

// With size 1 everything is a no-op: no socket, no thread.
class ControlChannel {
public:
    // Meets the others: see open_group() for addresses and errors. To be called once by each rank, before memory is
    // allocated or files are written.
    explicit ControlChannel(const Place& place, const ControlSettings& settings = {}, const Share& share = {});
    // Without a leave() before, this rank is dead for the others.
    ~ControlChannel();

    // Every rank's host and pid, by rank.
    const std::vector<Member>& members() const { return members_; }

    // The next three are called by all ranks in the same order, from one thread, with texts of at most 64 KiB. `what`
    // names the matter in errors. When ranks ask for different things, all fail with Exit::internal and the same
    // sentence. After a failure the channel only serves to be destroyed, within 20 s: else the thread ends the process.
    // When a rank has not asked answer_s after the first, all processes end as described above, with Exit::hang.

    // The texts of all ranks, by rank.
    std::vector<std::string> all_gather(const std::string& mine, const char* what);
    // Rank 0's text.
    std::string broadcast(const std::string& mine, const char* what);
    // Fails with Exit::config, naming ranks, hosts and texts, unless all texts are equal.
    void require_same(const std::string& mine, const char* what);

    // What this rank does now. Cheap (a few stores); all but note_step() are callable from any thread. `name` must live
    // as long as the program.
    void note_phase(Phase phase, int64_t step) {
        progress_.phase.store(phase, std::memory_order_relaxed);
        progress_.step.store(step, std::memory_order_relaxed);
        progress_.ticks.fetch_add(1, std::memory_order_relaxed);
    }
    // A micro-step of this step. The first step that a process takes is still a part of its start: that is where
    // products are timed and kernels are loaded.
    void note_step(int64_t step) {
        if (first_step_ < 0) first_step_ = step;
        note_phase(step == first_step_ ? Phase::start : Phase::step, step);
    }
    // Before the collective with this number (1, 2, ... on every rank) begins.
    void note_collective(uint64_t number, const char* name) {
        progress_.collective_name.store(name, std::memory_order_relaxed);
        progress_.collective.store(number, std::memory_order_relaxed);
        progress_.ticks.fetch_add(1, std::memory_order_relaxed);
    }

    // Runs before the thread ends the process, in a thread of its own and for 2 s at most: the place to abort what
    // would otherwise outlive the process.
    void on_end(std::function<void()> callback);

    // The orderly end: waits until all ranks have called it. Fails with Exit::hang after leave_s.
    void leave();
    // This rank ends because of an error of its own: the others print the sentence and end with Exit::peer_lost. Takes
    // 2 s at most, then the caller exits with `code`. If it turns out that another rank's death came first, which is
    // then the likely reason of the error, the process ends as described above and this does not return.
    void leave_with_error(Exit code, const std::string& sentence);

private:
    Progress progress_;
    int64_t first_step_ = -1;
    std::vector<Member> members_;
    ControlSettings settings_;
    std::unique_ptr<Watcher> watcher_;  // null with size 1
};
