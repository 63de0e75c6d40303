// Checkpoints that are written while training goes on.
//
//     BackgroundSave saver(run_dir, comm, retention);
//     saver.reserve(gpt.saved_tensors());
//     for each step:
//         votes = saver.progress()                 // each rank's, added up over the ranks with the step's other votes
//         if (result = saver.advance(sums)) ...    // all ranks see the same result after the same step
//         if (is due) saver.begin(state, gpt.saved_tensors());
//
// begin() copies this rank's part of the tensors to host memory, which is all that a step waits for. A thread of each
// rank then writes its shard file, and one of rank 0 commits. The threads take part in no collective: the ranks learn
// from the sums how far the others are. One save is under way at most.
#pragma once

#include <memory>

#include "runtime/checkpoint/checkpoint.h"

class BackgroundSave {
public:
    BackgroundSave(std::string run_dir, const Comm& comm, const Retention& retention);

    // Takes the memory of the copy: snapshot_bytes() of these tensors.
    void reserve(const std::vector<NamedTensor>& tensors);
    static size_t snapshot_bytes(const std::vector<NamedTensor>& tensors);

    // Begins to save one step; arguments as save_checkpoint()'s. A collective; requires that none is under way. Fails
    // on all ranks if the directory cannot be made.
    void begin(const TrainState& info, const std::vector<NamedTensor>& tensors);

    // How far this rank is with the save under way; added up over the ranks for advance(). All 0 if there is none.
    struct Progress {
        double unfinished = 0;  // its thread is at work
        double failed = 0, committed = 0;
    };
    Progress progress() const;

    // How a save has ended. On all ranks there is an error or on none.
    struct Result {
        int64_t step = 0;
        SaveStats stats = {};
        std::optional<Error> error = {};
        std::string warning = {};  // on rank 0: the step is committed, but retention failed
    };
    // What follows from the sums, which are the same on all ranks: the result, or the next phase.
    std::optional<Result> advance(const Progress& sums);

    // Waits for the save under way, all ranks together, for at most `limit_s` by rank 0's clock; nothing if it is still
    // not over. Requires that there is one.
    std::optional<Result> wait(double limit_s);

    bool is_under_way() const { return bool(job_); }
    int64_t step() const;      // of the save under way
    double elapsed_s() const;  // since it began

private:
    struct Job;
    void start_commit();

    const std::string run_dir_;
    const Comm comm_;
    const Retention retention_;
    // Shared with the threads, which may be stuck in the file system when the program ends.
    std::shared_ptr<std::vector<std::byte>> snapshot_;
    std::shared_ptr<Job> job_;  // null: none under way
};
