// The directory of a run: who may start in it, and that only one process does.
#pragma once

#include <string>

// Holds RUN/lock (flock on an open file) as long as it lives. A process that dies loses its lock at once, so a lock
// file that is left over stops nobody. The file says who holds it: pid, host, boot id.
class RunLock {
public:
    RunLock() = default;
    // `run_dir` exists. Exit::cannot_create, naming the holder, if another process has it; never waits.
    explicit RunLock(const std::string& run_dir);
    RunLock(RunLock&& other) noexcept;
    RunLock& operator=(RunLock&& other) noexcept;  // swaps
    ~RunLock();

private:
    int descriptor_ = -1;
};

// The flag of the command line: none, --resume, --auto, --fresh.
enum class StartMode { only_new, resume, automatic, fresh };

// What is at run.dir; a directory that holds nothing but a lock file is empty.
enum class RunDirState { absent, empty, occupied };

enum class StartAction {
    start,                 // in an empty directory
    resume,                // nothing loadable: exit 66
    resume_or_start,       // nothing loadable: start
    move_aside_and_start,  // to run.dir.old-N
};

// Exit::usage if the directory is occupied and no flag says what to do (the sentence names the three), Exit::no_input
// if
// --resume finds no directory or an empty one.
StartAction decide_start(StartMode mode, RunDirState state, const std::string& run_dir);

// Exit::cannot_create if `run_dir` is something else than a directory.
RunDirState state_of_run_dir(const std::string& run_dir);

struct OpenedRun {
    RunLock lock;          // keep it for the run's whole life
    StartAction action;    // move_aside_and_start has been carried out: the directory is empty
    std::string moved_to;  // where an older run was moved; empty if none was
};

// Decides, makes the directory, locks it, and moves an older run aside if that was asked for. Where it refuses, nothing
// has been touched. Called by rank 0 alone.
OpenedRun open_run_directory(const std::string& run_dir, StartMode mode);

// 128 random bits as 32 hexadecimal digits: a new run's name in its checkpoints.
std::string new_run_id();

// The first of prefix + "1", prefix + "2", ... where nothing is.
std::string first_unused(const std::string& prefix);
