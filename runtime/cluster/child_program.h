// A program that this process starts, owns and waits for: mpirun, or what a supervisor watches over.
#pragma once

#include <unistd.h>

#include <csignal>
#include <functional>
#include <optional>
#include <string>
#include <vector>

// The signals that ask a run to stop (SIGINT, SIGTERM, SIGUSR1, SIGUSR2) and SIGHUP and SIGPIPE are blocked from the
// construction on, for the rest of the process: none is lost, and a closed terminal or pipe ends nothing. Must be
// constructed before other threads run.
class StopSignals {
public:
    StopSignals();
    // Waits for one of the four, at most so long; 0 if none came. Returns early when a child has ended.
    int wait(double limit_s);
    int received() const { return received_; }               // the first of them, or 0
    const sigset_t& mask_before() const { return before_; }  // for children

private:
    sigset_t waited_for_, before_;
    int received_ = 0;
};

// Runs the command to its end, in a process group of its own and without input, and returns its exit code: 128 + signal
// if a signal killed it, and Exit::hang, with everything it started killed, if `find_hang` returns a sentence, which is
// printed. Then kills all processes that it has left.
//
// The first signal to this process asks the program to stop, by SIGUSR1 each second until it ends: mpirun kills its
// ranks 2 s after a SIGTERM or SIGINT, but hands on SIGUSR1, and to the trainer all of them mean the same. A program
// that does not handle it yet has not begun, so its death by it is Exit::again. A second SIGINT or SIGTERM is passed on
// as it is; what has not ended 10 s later is killed. If this process dies, the program receives SIGTERM.
//
// The program's standard output is `output`. Every 0.1 s at least find_hang() is called.
//
// Fails with Exit::os if no process can be started; a command that cannot be executed is named on stderr.
int run_child(std::vector<std::string> command, StopSignals& signals,
              const std::function<std::optional<std::string>()>& find_hang = {}, int output = STDOUT_FILENO);

// A find_hang for a launcher that starts ranks as its children: returns a sentence if the last of them ended `limit_s`
// ago. On busy cores mpirun of Open MPI 4.1 has been seen to wait for a lock in PMIx_server_finalize() forever.
std::function<std::optional<std::string>()> find_childless_launcher(const std::string& name, double limit_s);

// The pointers that exec expects, valid as long as `arguments`.
std::vector<char*> argv_of(std::vector<std::string>& arguments);
