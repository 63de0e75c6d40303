#include <algorithm>
#include <filesystem>

#include "runtime/checkpoint/checkpoint.h"
#include "runtime/io/files.h"
#include "runtime/io/lock.h"

void check_start(StartMode mode, RunDirState state, const std::string& run_dir) {
    bool is_occupied = state == RunDirState::occupied;
    if (mode == StartMode::only_new && is_occupied)
        fail(Exit::usage,
             "run.dir %s is not empty: --resume continues the run, --auto continues it if it has a checkpoint, --fresh "
             "moves it aside and starts over",
             run_dir);
    if (mode == StartMode::resume && !is_occupied)
        fail(Exit::no_input, "--resume: run.dir %s %s", run_dir,
             state == RunDirState::absent ? "does not exist" : "is empty");
}

RunDirState state_of_run_dir(const std::string& run_dir) {
    std::error_code error;  // ENOTDIR is not absence: a parent of the path is a file
    const auto type = std::filesystem::symlink_status(run_dir, error).type();
    if (type == std::filesystem::file_type::not_found && error == std::errc::no_such_file_or_directory)
        return RunDirState::absent;
    if (error == std::errc::filename_too_long) fail(Exit::cannot_create, "run.dir %s: %s", run_dir, error.message());
    if (!directory_exists(run_dir)) fail(Exit::cannot_create, "run.dir %s is not a directory", run_dir);
    const auto is_lock = [](const std::string& name) { return name == kLockName; };
    return std::ranges::all_of(list_directory(run_dir), is_lock) ? RunDirState::empty : RunDirState::occupied;
}

DirectoryLock open_run_directory(const std::string& path, StartMode mode) {
    const std::string run_dir = path.substr(0, std::max<size_t>(path.find_last_not_of('/') + 1, 1));  // npos + 1 is 0
    check_start(mode, state_of_run_dir(run_dir), run_dir);  // fails before anything is created
    make_directories(run_dir);
    sync_directory(directory_of(run_dir));
    DirectoryLock lock(run_dir);
    // Check again: another process may have used the directory before this one got the lock.
    RunDirState state = {};
    lock.guard([&] {
        check_start(mode, state = state_of_run_dir(run_dir), run_dir);
        remove_temporary_files(run_dir);
    });
    if (mode == StartMode::fresh && state == RunDirState::occupied) {
        rename_path(run_dir, first_unused(run_dir + ".old-"));
        make_directories(run_dir);
        sync_directory(directory_of(run_dir));
        lock = DirectoryLock(run_dir);  // releases the lock of the older run
    }
    return lock;
}

std::string first_unused(const std::string& prefix) {
    std::error_code ignored;
    int number = 1;
    while (std::filesystem::exists(std::filesystem::symlink_status(prefix + std::to_string(number), ignored))) number++;
    return prefix + std::to_string(number);
}
