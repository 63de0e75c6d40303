// How the ranks of this machine report to the process that supervises them: a datagram each second over a Unix socket,
// from before they look for each other until they end. They find its name in TRAIN_GPT_SUPERVISOR.
#pragma once

#include <map>
#include <memory>
#include <thread>

#include "runtime/cluster/rank_activity.h"

// A rank's part: sends until it is destroyed. Does nothing if no process supervises this one.
class RankReporter {
public:
    RankReporter(const RankEnvironment& environment, std::shared_ptr<const RankActivity> activity, double every_s);

private:
    std::jthread thread_;
};

// The supervisor's part.
class RankReports {
public:
    // Expects reports of the ranks first .. first + count - 1. If they are `all` ranks of the run and only one, its
    // progress is watched too; several watch each other's, and only silence is left to be noticed here.
    RankReports(int first, int count, bool all, const ControlSettings& settings);

    const std::string& name() const { return name_; }  // for TRAIN_GPT_SUPERVISOR
    void begin();                                      // the ranks start now; forgets those of an earlier start
    // Receives what has arrived. Returns a sentence about a rank that hangs, or about what has started the ranks if it
    // hangs (goes on twice parallel.silence_s after the end of one), or nothing. To be called several times a second.
    std::optional<std::string> find_hang();

private:
    void receive(TimePoint now);

    const int first_, count_;
    const bool is_alone_;
    const ControlSettings settings_;
    FileDescriptor socket_;
    std::string name_;
    std::map<int, MonitoredRank> ranks_;  // that have reported
    TimePoint begun_, last_round_;
    std::optional<TimePoint> first_end_;  // of a rank that had reported
};
