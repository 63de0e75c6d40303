// Which file operations fail and how, as the tests tell inject.cpp and faulty_fs.cpp:
//
//   call=fsync|fdatasync,path=*/checkpoints,nth=2,action=EIO; call=read,rate=0.01,seed=7,action=hang:2.5
//
//   call     names of operations, separated by |; without it all of them
//   path     fnmatch() pattern of the absolute path, in which * matches / too; without it all of them
//   nth      the first operation concerned, counted per rule from 1; 1 if it is not given
//   times    how many are concerned from there on: 1 if it is not given, `all` for a fault that stays
//   rate     each operation is concerned with this probability, drawn from `seed`; then nth and times do not apply
//   rank     only in the process of this rank
//   action   an errno's name, short (half of the bytes are moved), flip (one bit of the bytes changes), kill and
//            kill_after (SIGKILL before and after the operation), hang:SECONDS, late:SECONDS (hangs for one second,
//            and the monotonic clock advances by SECONDS; inject.cpp only), log (of all; inject.cpp only)
//
// Of several rules that concern an operation the first one decides; all of them count it.
#pragma once

#include <mutex>
#include <random>
#include <string>
#include <vector>

struct Fault {
    enum Kind { none, fail, shorten, flip, kill, kill_after, hang, late, log } kind = none;
    int error = 0;  // errno of `fail`
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
    // Throws std::invalid_argument that names the part which is not understood.
    explicit FaultRules(const std::string& text = "");

    // Of the first rule that concerns this operation. Counts the operation; threads may call this at the same time.
    Fault next(const std::string& call, const std::string& path, int rank = -1);

    // A line per rule: how many operations it matched, how many faults it caused, and its text.
    std::string report();

    // Instead of the rules so far.
    void replace(const std::string& text);

private:
    std::mutex mutex_;
    std::vector<FaultRule> rules_;
};

// Sleeps for the seconds of a hang.
void sleep_for(double seconds);

// A copy of the bytes in which the lowest bit of the middle one differs.
std::string with_flip(const void* bytes, size_t count);
