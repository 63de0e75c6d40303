// Which rank is to blame when a run stands still: a pure decision from what the ranks have reported.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/cluster/rendezvous.h"

// What a rank is doing; each phase has its own patience.
enum class Phase : int { start, step, evaluation, save, end };

// Seconds. A rank makes progress when it notes a phase, a step or a collective, and when it asks the others something.
struct WatchSettings {
    double heartbeat_s = 1;  // between two reports
    double silence_s = 60;   // without any report: the process is stopped, its machine or the network is gone
    double start_s = 300;    // without progress, by phase
    double step_s = 120;
    double evaluation_s = 120;
    double save_s = 900;
    double end_s = 300;
};

struct RankReport {
    Phase phase = Phase::start;
    int64_t step = -1;        // -1: none yet
    uint64_t ticks = 0;       // grows with all progress
    uint64_t collective = 0;  // number of the last collective that was begun; 0: none yet
    std::string collective_name;
    std::string text() const;  // "in phase step, step 12, last collective 40 (all_reduce of gradients)"
};

// Where the trainer writes what it does and the watching thread reads it. The members may be a moment apart.
struct Progress {
    std::atomic<Phase> phase{Phase::start};
    std::atomic<int64_t> step{-1};
    std::atomic<uint64_t> ticks{0}, collective{0};
    std::atomic<const char*> collective_name{""};
    RankReport report() const;
};

struct WatchedRank {
    Member member;
    RankReport report;
    TimePoint heard, moved;   // when the last report came; when the last one with progress came
    bool is_excused = false;  // has left, or waits for an answer of the others
};

struct Hang {
    int rank = 0;
    std::string sentence;  // one, which names rank, host, pid, times and where it was
};

// The rank that hangs at `now`, if one does. A silent rank is the one. Where there is no progress, most ranks only wait
// for one that did not come: the one whose last collective has the lowest number, among equals the one that has stood
// still for longest. The others are patient as long as that one is within the time of its phase, and as long as the
// longest of all phases.
std::optional<Hang> find_hang(const std::vector<WatchedRank>& ranks, const WatchSettings& settings, TimePoint now);
