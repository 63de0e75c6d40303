// A program that this process starts, owns and waits for: mpirun, the run of a supervisor, or the check of kernels.
#pragma once

#include <unistd.h>

#include <csignal>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/io/files.h"

// Blocks the signals that ask a run to stop (SIGINT, SIGTERM, SIGUSR1, SIGUSR2), SIGHUP and SIGPIPE from its
// construction to the end of the process. No stop signal is lost, and a closed terminal or pipe does not end the
// process. Must be constructed before other threads run.
class StopSignals {
public:
    StopSignals();
    // Waits up to `limit_s` for one of the four stop signals and returns it, or 0 if none came. Returns early when a
    // child has ended.
    int wait(double limit_s);
    int received() const { return received_; }               // the first stop signal, or 0
    const sigset_t& mask_before() const { return before_; }  // for children

private:
    sigset_t waited_for_, before_;
    int received_ = 0;
};

// Starts a process in its own process group, without input and with the signals that were blocked before `signals`. It
// receives `last_signal` when this process dies. There `execute` calls exec; if it returns, the exit code is Exit::os.
// This process has one thread, so `execute` may call any function. Fails with Exit::os, naming `name`, if fork fails.
pid_t start_child(const std::string& name, int last_signal, const StopSignals& signals,
                  const std::function<void()>& execute);

// Runs the command to its end, in its own process group and without input, and returns its exit code, or 128 + signal
// if a signal killed it. Calls `find_hang` at least every 0.1 s; if it returns a sentence, prints it, kills the program
// and everything it started, and returns Exit::hang. At the end kills all remaining descendants.
//
// The first signal to this process asks the program to stop by sending SIGUSR1 each second until it ends. mpirun kills
// its ranks 2 s after a SIGTERM or SIGINT but forwards SIGUSR1, and the trainer treats all of them alike. A program
// that dies of SIGUSR1 has not installed its handler yet, so nothing has begun: the result is Exit::again. A second
// SIGINT or SIGTERM is forwarded unchanged; everything that is still running 10 s later is killed. If this process
// dies, the program receives SIGTERM.
//
// The program's standard output goes to `output`.
//
// Fails with Exit::os if the process cannot be started. If the command cannot be executed, prints its name on stderr.
int run_child(std::vector<std::string> command, StopSignals& signals,
              const std::function<std::optional<std::string>()>& find_hang = {}, int output = STDOUT_FILENO);

// Returns a find_hang for a launcher whose children are the ranks: it returns a sentence once the last of them ended
// more than `limit_s` ago. On busy cores mpirun of Open MPI 4.1 sometimes waits forever for a lock in
// PMIx_server_finalize().
std::function<std::optional<std::string>()> find_childless_launcher(const std::string& name, double limit_s);

// Returns the pointers that exec expects, valid as long as `arguments`.
std::vector<char*> argv_of(std::vector<std::string>& arguments);

// Starts a program without input, in its own process group, and collects its output. Killed if the object is destroyed
// before the program has ended. Works in a process with several threads.
class Subprocess {
public:
    // Fails with Exit::os if the program cannot be started.
    explicit Subprocess(std::vector<std::string> command);
    ~Subprocess();
    Subprocess(const Subprocess&) = delete;
    Subprocess& operator=(const Subprocess&) = delete;

    struct Result {
        std::string output;       // standard output and standard error
        std::optional<int> code;  // exit code, or 128 + signal; none if the program did not end in time
    };
    // Waits for the end of the program, at most until `limit_s` after its start. Then kills everything that is left of
    // it. Call once.
    Result wait(double limit_s);

private:
    pid_t pid_ = 0;
    FileDescriptor output_;
    double start_ms_ = 0;
};
