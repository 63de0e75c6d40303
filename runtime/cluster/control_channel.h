// A star of TCP connections to rank 0, independent of the network that carries tensors. Through it the ranks compare
// their configuration and detect within seconds that one of them has died or hangs.
//
//     ControlChannel control(find_rank_environment());
//     control.require_same(digest, "configuration");
//     for (...) control.note_step(step), ...
//     control.leave();
//
// A thread on each rank sends a heartbeat every second and receives those of the others. The mutex that it shares with
// the trainer is never held during the trainer's work. When a rank dies, hangs or leaves with an error, the thread of
// every other rank prints one sentence on stderr that names the rank, its host and pid, what happened, its phase, step
// and last collective, and ends the process by _exit with Exit::peer_lost (76) or, for a hang, Exit::hang (80); a rank
// that hangs does so as well if it still can. No rank saves a checkpoint then, because a collective save cannot
// succeed. A rank that has received a signal to stop counts as alive until it leaves.
//
// If all processes of a run are stopped and continued (SIGSTOP, a suspended machine), no rank is blamed.
#pragma once

#include <condition_variable>
#include <memory>
#include <thread>

#include "kernels/base/check.h"
#include "runtime/cluster/rank_activity.h"

// With one rank everything is a no-op: no socket, no thread. If a channel is destroyed without a call of leave()
// before, the other ranks treat this one as dead.
class ControlChannel {
public:
    // Connects the ranks: see open_group() for addresses and errors. Every rank calls it once, before memory is
    // allocated and files are written. `activity` is what others than the ranks read too.
    explicit ControlChannel(const RankEnvironment& environment, const ControlSettings& settings = {},
                            const TextBroadcast& broadcast = {},
                            std::shared_ptr<RankActivity> activity = std::make_shared<RankActivity>());

    // The next two are collectives: all ranks call them in the same order, from one thread, with texts of at most
    // 64 KiB. `what` names the subject in errors. If the calls differ between ranks, all fail with Exit::internal and
    // the same message. After an error the channel must be destroyed within 20 s; otherwise its thread ends the
    // process. If some ranks do not call within collective_timeout_s of the first, all processes end as described
    // above, with Exit::hang.

    // Returns the texts of all ranks, by rank.
    std::vector<std::string> all_gather(const std::string& mine, const char* what);
    // Fails with Exit::config, naming ranks, hosts and texts, unless all texts are equal.
    void require_same(const std::string& mine, const char* what) { collective({true, what, mine}); }

    // Record what this rank does now, for the hang detector: see RankActivity.
    void note_phase(Phase phase, int64_t step) { activity_->note_phase(phase, step); }
    void note_step(int64_t step) { activity_->note_step(step); }
    void note_collective(uint64_t number, const char* name) { activity_->note_collective(number, name); }

    // The orderly end: returns when all ranks have called it. Fails with Exit::hang after leave_timeout_s.
    void leave();
    // Reports that this rank exits because of an error of its own: the others print the message and end with
    // Exit::peer_lost. Takes 2 s at most; then the caller exits with `code`. If another rank died before, which is the
    // likely cause of the error, the process ends as described above and this does not return.
    void leave_with_error(Exit code, const std::string& sentence);

private:
    bool is_connected() const { return !connections_.empty(); }
    std::string collective(const TextRequest& request);
    void tell_rank_0(MessageKind kind, const std::string& fields);  // also on rank 0

    // The thread. These hold mutex_.
    void run(const std::stop_token& stop);
    void receive_all(TimePoint now);
    void handle(int rank, const Message& message, TimePoint now);
    void check(TimePoint now);
    void send_to_all(MessageKind kind, const std::string& fields);
    void deliver(const TextReply& reply);
    void end_run(const EndOfRun& end);
    void end_here(const EndOfRun& end);
    void drain_connections(double limit_s, int except_rank = -1);
    void finish();

    const int rank_;
    const ControlSettings settings_;
    FileDescriptor wake_;  // an eventfd: the thread has a message to handle or to send
    const std::shared_ptr<RankActivity> activity_;

    std::mutex mutex_;  // guards what follows; waiting for input releases it
    std::condition_variable changed_;
    std::vector<Connection> connections_;  // both as from open_group()
    std::vector<MonitoredRank> ranks_;
    TimePoint last_round_, last_heartbeat_;
    std::optional<TextReply> reply_;         // to the last collective
    std::optional<TimePoint> failed_since_;  // a collective has failed on all ranks: no rank is monitored any more
    std::optional<EndOfRun> error_;          // on rank 0: a reported error, until no death is found to have caused it
    TimePoint error_since_;
    bool has_reported_error_ = false, has_left_ = false, has_finished_ = false;

    std::jthread thread_;  // the last member: it ends before what it uses
};
