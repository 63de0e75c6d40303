// Real processes as ranks of a run: forked from the test, each with what it prints on stderr in a file of its own, none
// of them left when the test ends.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "runtime/cluster/place.h"
#include "runtime/cluster/socket.h"
#include "test/temporary_directory.h"

class RankProcesses {
public:
    // What a rank does; its result is the exit code. An Error is printed and ends it with its own code, as main() does.
    using Body = std::function<int(const Place&)>;

    // A token and a listening socket for `size` ranks on this machine. Starts nothing.
    explicit RankProcesses(int size);
    ~RankProcesses();

    // The place that the launcher would give this rank.
    Place place(int rank) const;

    int start(const Place& place, const Body& body);  // the process's number, from 0
    void start_all(const Body& body);                 // process r is rank r
    void kill(int process, int signal) const;
    pid_t pid(int process) const { return pids_[size_t(process)]; }

    // Its exit code; 128 + signal if one killed it; -1 if it is still there after `limit_s`.
    int wait(int process, double limit_s = 20);
    std::string printed(int process) const;  // on stderr so far

    // Called in a rank's process: lets the test's wait_until_ready() count it.
    void ready() const;
    void wait_until_ready(int count) const;

private:
    int size_;
    Place shared_;
    Socket listener_;
    int ready_pipe_[2];
    TemporaryDirectory directory_;
    std::vector<pid_t> pids_;
    std::vector<int> codes_;  // -1: not ended
};
