// Processes as ranks of a run, forked from the test. Each process's stderr is kept in a file; processes that still run
// when the test ends are killed.
#pragma once

#include <sys/types.h>

#include "runtime/cluster/rank_environment.h"
#include "runtime/cluster/socket.h"
#include "runtime/io/files.h"
#include "runtime/io/json.h"
#include "test/support/temporary_directory.h"

class RankProcesses {
public:
    // Returns the rank's exit code. An Error is printed and the process exits with its code, as in main().
    using Body = std::function<int(const RankEnvironment&)>;

    // Creates a token and a listening socket for `size` ranks on this machine; starts no process.
    explicit RankProcesses(int size);
    ~RankProcesses();

    // The environment that the launcher would set for this rank.
    RankEnvironment environment_of(int rank) const;

    int start(const RankEnvironment& environment, const Body& body);  // the process's number, from 0
    void start_all(const Body& body);                                 // process r is rank r
    void kill(int process, int signal) const;
    pid_t pid(int process) const { return pids_[size_t(process)]; }

    // Returns its exit code, 128 + signal if one killed it, or -1 if it still runs after `limit_s`.
    int wait(int process, double limit_s = 20);
    std::string printed(int process) const;  // on stderr so far

    // Called in a rank's process; wait_until_ready() in the test counts the calls.
    void ready() const;
    void wait_until_ready(int count) const;

private:
    int size_;
    RankEnvironment shared_;
    FileDescriptor listener_;
    int ready_pipe_[2];
    TemporaryDirectory directory_;
    std::vector<pid_t> pids_;
    std::vector<int> codes_;  // -1: still running
};
