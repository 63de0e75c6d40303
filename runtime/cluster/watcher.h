// The thread behind ControlChannel: it alone uses the connections; the trainer hands it wishes and waits for answers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/cluster/questions.h"
#include "runtime/cluster/rendezvous.h"
#include "runtime/cluster/watch.h"

class Watcher {
public:
    // `progress` is this rank's, and outlives the watcher. The other numbers are seconds, as in ControlSettings.
    Watcher(int rank, Group group, const WatchSettings& settings, double answer_s, Progress& progress);
    ~Watcher();
    Watcher(const Watcher&) = delete;
    Watcher& operator=(const Watcher&) = delete;

    // As in ControlChannel.
    std::string ask(Question question, const char* what, const std::string& text);
    void on_end(std::function<void()> callback);
    void leave(double limit_s);
    void leave_with_error(Exit code, const std::string& sentence);

private:
    // Why the run ends.
    struct Verdict {
        int rank = 0;
        Exit code = Exit::peer_lost;
        bool is_error = false;  // the rank said so itself, in order
        std::string sentence;
    };

    void run();
    void wait_for_news();
    void forgive_own_sleep(TimePoint now);
    void take_wishes(TimePoint now);
    void listen(TimePoint now);
    void report(TimePoint now);
    void judge(TimePoint now);

    void hear(int rank, const Message& message, TimePoint now);
    void hear_rank_0(const Message& message, TimePoint now);
    void take_report(int rank, const std::string& fields, TimePoint now);
    void take_question(int rank, FieldReader& reader, TimePoint now);
    void lost(int rank);
    void answer_all(const Answer& answer);
    void pronounce(const Verdict& verdict);
    void obey(const Verdict& verdict);
    void linger(double limit_s, int except_rank = -1);
    [[noreturn]] void end(Exit code, const std::string& sentence);

    void deliver(const Answer& answer);
    void finish();
    void wake();
    Connection& connection_to(int rank) { return connections_[rank_ == 0 ? size_t(rank) : 0]; }

    const int rank_;
    const WatchSettings settings_;
    const double answer_s_;
    Progress& progress_;
    Socket wake_;  // an eventfd

    // The thread's own.
    std::vector<Connection> connections_;  // as in Group
    std::vector<WatchedRank> ranks_;       // rank 0: all; others: only [0] is kept up to date
    std::vector<bool> has_left_;           // rank 0: who said goodbye
    Questions questions_;                  // rank 0
    std::optional<Verdict>
        pending_;  // rank 0: an error that a rank reported, until it is clear that no death came first
    TimePoint pending_since_, last_round_, reported_;
    Answer failure_;  // of a question, known to all; from then on nobody is watched
    TimePoint failed_since_;
    bool said_goodbye_ = false, told_error_ = false, failed_together_ = false, is_finished_ = false;

    // Between the thread and the trainer.
    std::mutex mutex_;
    std::condition_variable changed_;
    std::optional<Asked> question_;
    std::optional<Answer> answer_;
    std::optional<Verdict> error_;  // of this rank
    std::vector<int> staying_;      // rank 0: who has not said goodbye
    bool wants_to_leave_ = false, quits_ = false, has_finished_ = false;
    std::function<void()> on_end_;

    std::thread thread_;
};
