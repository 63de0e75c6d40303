// How the ranks of this machine report to their supervisor: a datagram each second over a Unix socket, from before the
// rendezvous until they end. TRAIN_GPT_SUPERVISOR holds the socket's name.
#pragma once

#include <map>
#include <memory>
#include <thread>

#include "runtime/cluster/rank_environment.h"
#include "runtime/cluster/rank_monitor.h"
#include "runtime/cluster/socket.h"
#include "runtime/io/files.h"

// A rank's side: returns a thread that sends reports until it is stopped; none without a supervisor.
std::jthread start_reports(const RankEnvironment& environment, std::shared_ptr<const RankActivity> activity,
                           double every_s);

// The supervisor's side.
class RankReports {
public:
    // Expects reports of the ranks first .. first + count - 1, of none if `count` is 0; `all` means that the run has no
    // others. If the run has a single rank, its progress is monitored too. Several ranks monitor each other's progress,
    // so only silence is detected here.
    RankReports(int first, int count, bool all, const ControlSettings& settings);

    const std::string& name() const { return name_; }  // for TRAIN_GPT_SUPERVISOR
    void begin();                                      // the ranks start now; forgets an earlier start
    // Receives all pending reports. Returns a sentence if a rank hangs, or if the launcher of the ranks still runs
    // longer than twice parallel.silence_s after one of them ended; else nothing. Call it several times a second.
    std::optional<std::string> find_hang();

private:
    void receive(TimePoint now);

    const int first_, count_;
    const bool is_alone_;
    const ControlSettings settings_;
    FileDescriptor socket_;
    std::string name_;
    std::map<int, MonitoredRank> ranks_;  // the ranks that have reported
    TimePoint begun_, last_round_;
    std::optional<TimePoint> first_end_;  // when the first of them ended
};
