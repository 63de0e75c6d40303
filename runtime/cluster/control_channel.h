// The control channel: TCP connections between rank 0 and every other rank, independent of the network that carries
// tensors. The ranks use it to compare their configuration and to detect within seconds that a rank has died or hangs.
//
//     ControlChannel control(find_rank_environment());
//     control.require_same(digest, "configuration");
//     for (...) control.note_step(step), ...
//     control.leave();
//
// A thread on each rank sends a heartbeat every second and receives the other side's heartbeats. It shares a mutex with
// the trainer, which is never held during the trainer's work. When a rank dies, hangs or leaves with an error, the
// thread of every other rank prints one sentence on stderr and ends the process by _exit. The sentence names the rank,
// its host and pid, what happened, its phase, step and last collective. The exit code is Exit::peer_lost (76) or, for a
// hang, Exit::hang (80). A rank that hangs does the same if it still can. No rank saves a checkpoint at this point,
// because a collective save cannot succeed. A rank that has received a signal to stop counts as alive until it leaves.
//
// If all processes of a run are stopped and continued (SIGSTOP, a suspended machine), no rank is blamed.
#pragma once

#include <condition_variable>
#include <memory>
#include <thread>

#include "kernels/base/check.h"
#include "runtime/cluster/connection.h"
#include "runtime/cluster/rank_environment.h"
#include "runtime/cluster/rank_monitor.h"  // IWYU pragma: export
#include "runtime/cluster/rendezvous.h"
#include "runtime/cluster/socket.h"
#include "runtime/cluster/wire_format.h"
#include "runtime/io/files.h"

// With one rank all calls are no-ops: no socket, no thread. If a channel is destroyed before leave() is called, the
// other ranks treat this one as dead.
class ControlChannel {
public:
    // Connects the ranks; see open_group() for addresses and errors. Every rank calls it once, before it allocates
    // memory or writes files. `activity` is shared with other readers, such as start_reports().
    explicit ControlChannel(const RankEnvironment& environment, const ControlSettings& settings = {},
                            const TextBroadcast& broadcast = {},
                            std::shared_ptr<RankActivity> activity = std::make_shared<RankActivity>());

    // The next two are collectives: all ranks call them in the same order, from one thread, with texts of at most 64
    // KiB. `what` names the subject in errors. If the calls differ between ranks, all fail with Exit::internal and the
    // same message. After an error the channel must be destroyed within 20 s; otherwise its thread ends the process. If
    // some ranks do not call within collective_timeout_s of the first, all processes end as described above, with
    // Exit::hang.

    // Returns the texts of all ranks, by rank.
    std::vector<std::string> all_gather(const std::string& mine, const char* what);
    // Fails with Exit::config, naming ranks, hosts and texts, unless all texts are equal.
    void require_same(const std::string& mine, const char* what) { collective({true, what, mine}); }

    // Record this rank's current activity for the hang detector; see RankActivity.
    void note_phase(Phase phase, int64_t step) { activity_->note_phase(phase, step); }
    void note_step(int64_t step) { activity_->note_step(step); }
    void note_collective(uint64_t number, const char* name) { activity_->note_collective(number, name); }

    // Rank 0: the text of each rank. Other ranks: of rank 0. Empty with one rank.
    std::vector<std::string> member_texts() const;

    // Ends the run cleanly: returns when all ranks have called it.
    void leave();
    // Reports that this rank exits because of its own error: the others print the message and end with Exit::peer_lost.
    // Takes at most 2 s; then the caller exits with `code`. If another rank died before, which is the likely cause of
    // the error, the process ends as described above and this call does not return.
    void leave_with_error(Exit code, const std::string& sentence);

private:
    bool is_connected() const { return !connections_.empty(); }
    std::string collective(const TextRequest& request);
    void send_to_rank_0(MessageKind kind, const std::string& fields);  // rank 0 may call it too

    // Called by the thread, which holds mutex_.
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

    std::mutex mutex_;  // guards the members below; released while waiting for input
    std::condition_variable changed_;
    std::vector<Connection> connections_;  // both as from open_group()
    std::vector<MonitoredRank> ranks_;
    TimePoint last_round_, last_heartbeat_;
    std::optional<TextReply> reply_;         // to the last collective
    std::optional<TimePoint> failed_since_;  // a collective has failed on all ranks: monitoring has ended
    std::optional<EndOfRun> error_;          // on rank 0: a reported error, held back in case a death caused it
    TimePoint error_since_;
    bool has_reported_error_ = false, has_left_ = false, has_finished_ = false;

    std::jthread thread_;  // last, so that it ends before the members that it uses
};
