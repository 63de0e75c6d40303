// Rules for injected faults of file operations, used by inject.cpp and faulty_fs.cpp:
//
//   call=fsync|fdatasync,path=*/checkpoints,nth=2,action=EIO; call=read,rate=0.01,seed=7,action=hang:2.5
//
//   call     names of operations, separated by |; default: all
//   path     fnmatch() pattern of the absolute path, in which * also matches /; default: all
//   nth      the first affected operation, counted per rule from 1; default 1
//   times    how many operations are affected from there; default 1; `all` for a permanent fault
//   rate     each operation is affected with this probability, drawn from `seed`; nth and times are ignored
//   rank     only in the process of this rank
//   action   an errno's name, short (half of the bytes are moved), flip (one bit of the bytes changes), kill and
//            kill_after (SIGKILL before and after the operation), hang:SECONDS, late:SECONDS (hangs for one second,
//            and the monotonic clock advances by SECONDS; inject.cpp only), log (of all; inject.cpp only)
//
// If several rules apply to an operation, the first one decides; all of them count it.
#pragma once

#include <cstdint>
#include <mutex>
#include <random>
#include <string>
#include <vector>

struct Fault {
    enum Kind { none, fail, shorten, flip, kill, kill_after, hang, late, log } kind = none;
    int error = 0;       // errno of `fail`
    double seconds = 0;  // of `hang` and `late`
};

struct FaultRule {
    std::string text;
    std::vector<std::string> calls;
    std::string path = "*";
    uint64_t first = 1, times = 1;
    double rate = 0;
    std::minstd_rand random{1};
    int rank = -1;
    Fault fault;
    uint64_t seen = 0, injected = 0;
};

class FaultRules {
public:
    // Throws std::invalid_argument naming the part that cannot be parsed.
    explicit FaultRules(const std::string& text = "");

    // The fault of the first rule that applies to this operation. Counts the operation. Thread-safe.
    Fault next(const std::string& call, const std::string& path, int rank = -1);

    // A line per rule: the number of operations that it matched, of faults that it caused, and its text.
    std::string report();

    // Replaces all rules.
    void replace(const std::string& text);

private:
    std::mutex mutex_;
    std::vector<FaultRule> rules_;
};

// Sleeps for the seconds of a hang.
void sleep_for(double seconds);

// A copy of the bytes with the lowest bit of the middle byte flipped.
std::string with_flip(const void* bytes, size_t count);
