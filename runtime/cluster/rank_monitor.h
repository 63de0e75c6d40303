// The reports of the ranks, and rank 0's decisions as pure functions of them: the rank to blame when a run makes no
// progress, and the reply to a collective of the control channel, which is the same for all ranks.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include "kernels/base/check.h"
#include "kernels/base/grid.h"
#include "runtime/cluster/rendezvous.h"
#include "runtime/cluster/socket.h"
#include "runtime/cluster/wire_format.h"

// The activity of a rank. Each phase has its own timeout.
enum class Phase : int { start, step, evaluation, save };

// All in seconds. Progress means: noting a phase, a step or a collective, or calling a collective of the control
// channel.
struct ControlSettings {
    double heartbeat_s = 1;  // between two heartbeats
    double silence_s = 60;   // without a heartbeat: the process is stopped, or the machine or network is down
    double start_s = 300;    // for all ranks to connect; without progress, by phase
    double step_s = 120;     // also in an evaluation
    double save_s = 900;
    double collective_timeout_s = 300;  // from the first to the last rank's call of all_gather() or require_same()
    Grid grid = {};                     // of all ranks
};

struct RankStatus {
    Phase phase = Phase::start;
    int64_t step = -1;        // -1: none yet
    uint64_t ticks = 0;       // increases with all progress
    uint64_t collective = 0;  // number of the last collective started; 0: none yet
    std::string collective_name;
    bool waits = false;          // for a collective, on the host
    uint64_t idle_ms = 0;        // since the last progress
    std::string text() const;    // "in phase step, step 12, last collective 40 (all_reduce of gradients)"
    std::string packed() const;  // the fields of a heartbeat
    bool unpack_from(std::string_view fields);  // returns false if they are malformed
};

// This rank's current activity: written by the trainer, read by rank 0's hang detector and the supervisor's.
class RankActivity {
public:
    // All of these except note_step() may be called from any thread.
    void note_phase(Phase phase, int64_t step) {
        const std::lock_guard lock(mutex_);
        status_.phase = phase;
        status_.step = step;
        tick();
    }
    // Notes a micro-step of this step. The first step of a process counts as Phase::start, because it loads kernels.
    void note_step(int64_t step) {
        if (first_step_ < 0) first_step_ = step;
        note_phase(step == first_step_ ? Phase::start : Phase::step, step);
    }
    // Call before the collective with this number (1, 2, ... on every rank) starts.
    void note_collective(uint64_t number, const char* name) {
        const std::lock_guard lock(mutex_);
        status_.collective_name = name;
        status_.collective = number;
        tick();
    }
    // Call before and after the host waits for a collective. Not progress.
    void note_wait(bool begins) {
        const std::lock_guard lock(mutex_);
        status_.waits = begins;
    }
    // Notes any other progress.
    void note_progress() {
        const std::lock_guard lock(mutex_);
        tick();
    }
    RankStatus now() const {
        const std::lock_guard lock(mutex_);
        RankStatus status = status_;
        status.idle_ms = uint64_t(1000 * seconds_between(ticked_, Clock::now()));
        return status;
    }

private:
    void tick() {
        ++status_.ticks;
        ticked_ = Clock::now();
    }

    mutable std::mutex mutex_;  // never held for longer than a copy
    RankStatus status_;
    TimePoint ticked_ = Clock::now();
    int64_t first_step_ = -1;
};

struct MonitoredRank {
    Member member;
    RankStatus status;
    TimePoint last_heard, last_progress;  // arrival of the last heartbeat; time of the last progress that it reported
    // A rank is never to blame if it has left or waits for the other ranks' part of a collective of the control
    // channel.
    bool has_left = false;
    std::optional<TextRequest> request = {};  // its part of a collective
    TimePoint requested = {};                 // when the request arrived
    void note(const RankStatus& heartbeat, TimePoint now);
};

// Why a run ends.
struct EndOfRun {
    int rank = 0;               // the rank to blame
    Exit code = Exit::ok;       // ok: all ranks have left
    std::string sentence = {};  // with the rank's host, pid and status
    bool is_reported = false;   // by the rank itself, with leave_with_error()
};

// These return the end of a run by Exit::hang, or nothing if no rank is to blame.

// Blames the rank that has been silent for longest, if that is more than silence_s.
std::optional<EndOfRun> find_silent_rank(const std::vector<MonitoredRank>& ranks, double silence_s, TimePoint now);

// Blames the rank that hangs at `now`, if any. A silent rank comes first. When progress stops, most ranks only wait for
// one that did not start the next collective: the rank with the lowest collective number and, among equal numbers, the
// longest time without progress. The others may wait while that rank is within its phase's timeout, but no longer than
// the longest timeout of all phases.
//
// Stages of a pipeline start different numbers of collectives. A rank that waits for one needs another rank, so the
// rank that hangs, in its computation or in a system call, is among those that do not wait, if there are any. The
// longest time without progress decides among them, and among all if a message is lost: the others go on until they
// need what follows it. That time alone would blame the last stage for a hang of the first while the pipeline fills.
// The host of a GPU rank waits mostly for its GPU, which does not count as waiting, and then that time decides. A
// stopped rank is silent.
std::optional<EndOfRun> find_hang(const std::vector<MonitoredRank>& ranks, const ControlSettings& settings,
                                  TimePoint now);

// Returns the reply once every rank has sent its request. Returns an error without waiting for the rest if two requests
// differ in operation or subject (Exit::internal) or `timeout_s` has passed since the first (Exit::hang), and if
// require_same finds different texts (Exit::config). After a reply the caller removes the requests.
std::optional<TextReply> reply_to_requests(const std::vector<MonitoredRank>& ranks, double timeout_s, TimePoint now);
