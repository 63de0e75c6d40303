// Checkpoints and the run directory. A committed checkpoint survives killed processes, power cuts and full disks, and
// damaged data is never loaded.
//
//   RUN/lock                                                                  locked by the running process
//   RUN/checkpoints/step_00000100/shard_0000.bin ... MANIFEST.json COMMIT     committed
//   RUN/checkpoints/tmp.00000100.1f2e3d4c/                                    being written, or left by a killed save
//   RUN/checkpoints/deleting.step_00000050/                                   being deleted by retention
//   RUN/checkpoints/damaged.step_00000090.1/, unhealthy.step_00000090.1/      set aside by find_newest_valid()
//   RUN/checkpoints/superseded.step_00000090.1/                               not continued from, e.g. after a rollback
//
// A checkpoint exists if and only if its COMMIT file does, which holds the size and hash of MANIFEST.json in one line.
// A save takes these steps: write, sync and read back the shard files; agree across ranks; write and sync the manifest,
// then COMMIT, then the directory; rename it to step_N; sync the parent. Committed files are never opened for writing.
// Saving, find_newest_valid() and apply_retention() require the run directory's lock.
#pragma once

#include <memory>
#include <optional>

#include "kernels/comm.h"                    // IWYU pragma: export
#include "runtime/checkpoint/manifest.h"     // IWYU pragma: export
#include "runtime/checkpoint/safetensors.h"  // IWYU pragma: export
#include "runtime/config/config.h"           // IWYU pragma: export
#include "runtime/io/files.h"
#include "runtime/io/lock.h"

// ---- saving ---------------------------------------------------------------------------------------------------------

struct SaveStats {
    size_t bytes = 0;  // tensor bytes over all ranks
    double seconds = 0;
    std::string directory;  // of the committed step
};

// Commits one step to `run_dir`, which must exist and be the same directory on all ranks. Collective: all ranks pass
// the same `info` and the same tensors in the same order, each with its own part. The parts together must cover every
// element exactly once; for a replicated tensor, one rank stores everything and the others have count 0. Tensors with
// larger elements must come first, so that all are aligned. Uses kBlockBytes of host memory, independent of the
// model's size. Sets aside existing checkpoints of this step and later ones as superseded, since the run did not
// continue from them. Fails on all ranks if one rank fails: with Exit::io if the disk is full or the data read back
// differs, or with Exit::cannot_create. The temporary directory is then removed and older checkpoints are unchanged.
SaveStats save_checkpoint(const std::string& run_dir, const Comm& comm, const TrainState& info,
                          const std::vector<NamedTensor>& tensors);

// Fails with Exit::io, with the numbers, if the run directory's disk has less than 1.2 x `bytes` free, where `bytes` is
// the size of one checkpoint. Called by save_checkpoint() and before a run's first step.
void check_space(const std::string& run_dir, size_t bytes);

// Which checkpoints of a run to keep: the newest `keep` (>= 1) healthy ones; with `keep_best`, the one with the lowest
// validation loss as recorded in the newest; with `rollback_every`, the newest healthy one whose step is a multiple of
// it, which is the target of a rollback.
struct Retention {
    int keep = 1;
    bool keep_best = false;
    int rollback_every = 0;
};

// Returns the steps to delete among these valid checkpoints, ascending. The newest `keep`, healthy or not, and those of
// other runs are never deleted. An unhealthy checkpoint never causes the deletion of a healthy one.
std::vector<int64_t> steps_to_delete(const std::vector<TrainState>& stored, const std::string& run_id,
                                     const Retention& wanted);

// Deletes the checkpoints selected by steps_to_delete() and returns their steps. Called on rank 0 after a commit.
// Checks again which checkpoints are valid (COMMIT, hash and content of the manifest, sizes of all shard files) and
// keeps invalid ones for inspection. Before a deletion, renames the directory to deleting.step_N and syncs the parent.
std::vector<int64_t> apply_retention(const std::string& run_dir, const std::string& run_id, const Retention& wanted);

// Writes checkpoints in the background while training continues.
//
//     BackgroundSave saver(run_dir, comm, retention);
//     saver.reserve(gpt.saved_tensors());
//     for each step:
//         votes = saver.progress()                 // summed over the ranks with the step's other votes
//         if (result = saver.advance(sums)) ...    // all ranks get the same result after the same step
//         if (is due) saver.begin(state, gpt.saved_tensors());
//
// begin() copies this rank's part of the tensors to host memory; only this copy blocks training. Then a thread of rank
// 0 makes the directory, a thread of each rank writes its shard file, and a thread of rank 0 commits. The threads call
// no collectives: the ranks learn each other's progress from the sums. At most one save runs at a time.
class BackgroundSave {
public:
    BackgroundSave(std::string run_dir, const Comm& comm, const Retention& retention);

    // Allocates the host memory for the copy of this rank's part of these tensors.
    void reserve(const std::vector<NamedTensor>& tensors);

    // Starts to save one step; arguments as in save_checkpoint(). Collective. Requires that no save is running. Rank
    // 0's thread calls `before_commit` when all parts are written; if that fails, the save fails.
    void begin(const TrainState& info, const std::vector<NamedTensor>& tensors, std::function<void()> before_commit);

    // This rank's progress with the running save, to be summed over the ranks for advance(). All 0 if there is none.
    struct Progress {
        double unfinished = 0;  // this rank's thread is running
        double failed = 0, committed = 0;
    };
    Progress progress() const;

    // The outcome of a save. Either all ranks have an error or none has.
    struct Result {
        int64_t step = 0;
        SaveStats stats = {};
        std::optional<Error> error = {};
        std::string warning = {};  // on rank 0: the step is committed, but retention failed
    };
    // Given the sums, which are the same on all ranks, returns the result of a finished save or starts the next stage.
    std::optional<Result> advance(const Progress& sums);

    // Waits at most `limit_s`, by rank 0's clock, for the running save. Returns nothing if it has not finished.
    // Collective. Requires a running save.
    std::optional<Result> wait(double limit_s);

    bool is_running() const { return bool(job_); }
    int64_t step() const;      // of the running save
    double elapsed_s() const;  // since its start

private:
    struct Job;

    const std::string run_dir_;
    const Comm comm_;
    const Retention retention_;
    // Shared with the threads, which may be stuck in the file system when the program exits.
    std::shared_ptr<std::vector<std::byte>> snapshot_;
    std::shared_ptr<Job> job_;  // null: no save is running
};

// ---- loading --------------------------------------------------------------------------------------------------------

enum class OtherTensors { refuse, ignore };

// A verified checkpoint, open for reading.
class Checkpoint {
public:
    // Verifies COMMIT, the manifest, file sizes, all block CRCs and file hashes; changes nothing. Fails with
    // Exit::data, naming the file, the offset and the expected and actual values, if the checkpoint is damaged; with
    // Exit::no_input if a file is missing; with Exit::io or Exit::permission if a file cannot be read.
    explicit Checkpoint(const std::string& directory);

    const std::string& directory() const { return directory_; }
    const Manifest& manifest() const { return manifest_; }
    // The configuration with which it was saved. Fails as parse_config() does.
    Config config() const { return parse_config(manifest_.info.config, directory_ + "/MANIFEST.json"); }

    // Copies this rank's part of each tensor to the device, and verifies the checksums again while reading. Before the
    // first copy, fails with Exit::data, naming the tensor, if a listed tensor is missing or has another type or shape,
    // or if the checkpoint has other tensors. If others are ignored, to load only the weights, their types may differ,
    // too: fp32 is rounded to bf16, bf16 becomes fp32.
    void load(const std::vector<NamedTensor>& tensors, OtherTensors others = OtherTensors::refuse) const;

private:
    std::string directory_;
    Manifest manifest_;
    std::vector<InputFile> files_;
};

// Reads and verifies COMMIT, the manifest and the shard files' sizes, not their content. Fails as Checkpoint does.
Manifest read_manifest(const std::string& directory);
// The last part of a save: writes and syncs MANIFEST.json, then COMMIT.
void write_manifest(const Manifest& manifest, const std::string& directory);

std::string checkpoints_directory(const std::string& run_dir);
std::string step_directory(const std::string& run_dir, int64_t step);

// Whether the directory of checkpoints exists. Fails with Exit::io or Exit::permission if that cannot be determined, or
// if it is a dangling link (an unmounted disk): the run must not start over then.
bool has_checkpoints(const std::string& run_dir);

// Returns the steps that have a directory step_N, ascending. Opens no files. Fails as has_checkpoints() does.
std::vector<int64_t> committed_steps(const std::string& run_dir);

// Renames the directory of a committed step to REASON.step_N.1 (or .2, ...), durably. Returns its new path.
std::string set_aside(const std::string& run_dir, int64_t step, const std::string& reason);

using Report = std::function<void(const std::string& sentence)>;

// Finds the checkpoint to resume from, on rank 0; the other ranks then open the directory that it found. Removes
// leftovers of killed saves and deletions, then tries the checkpoints from the newest to the oldest until one is valid
// and all its values are finite. Sets aside damaged and non-finite ones, and calls `report` for each. Reports a
// checkpoint that the system cannot read (I/O, permission) and leaves it unchanged. Returns nothing if no checkpoint is
// left. Fails with the first read error if the remaining ones cannot be read; throws NewerVersion at a checkpoint of a
// newer program version.
std::optional<Checkpoint> find_newest_valid(const std::string& run_dir, const Report& report);

// Opens the checkpoint of this step, healthy or not, and sets aside later ones as superseded. Fails with Exit::no_input
// if it does not exist.
Checkpoint open_step(const std::string& run_dir, int64_t step, const Report& report);

// Opens the checkpoint in a step directory, or the newest valid one of a run directory. Changes nothing. Fails with
// Exit::no_input if there is none, with Exit::data if the given step is damaged.
Checkpoint open_checkpoint(const std::string& path);

// The run that a step directory belongs to: RUN of RUN/checkpoints/step_N.
std::string run_directory_of(const std::string& step_directory);

// ---- the run's directory --------------------------------------------------------------------------------------------

// The command line flag: none, --resume, --auto, --fresh.
enum class StartMode { only_new, resume, automatic, fresh };

// The state of run.dir. A directory that contains only a lock file is empty.
enum class RunDirState { absent, empty, occupied };

// Fails with Exit::cannot_create if `run_dir` exists and is not a directory.
RunDirState state_of_run_dir(const std::string& run_dir);

// Fails with Exit::usage if the directory is occupied and no flag is given (the message names all three), and with
// Exit::no_input if --resume finds no directory or an empty one.
void check_start(StartMode mode, RunDirState state, const std::string& run_dir);

// Calls check_start(), makes and locks the directory, and with --fresh moves an older run to run.dir.old-N. If
// check_start() fails, nothing is changed. Returns the lock, which the caller keeps until the run ends. Rank 0 only.
DirectoryLock open_run_directory(const std::string& run_dir, StartMode mode);

// Returns the first path of prefix + "1", prefix + "2", ... that does not exist.
std::string first_unused(const std::string& prefix);

// ---- the start of a run ---------------------------------------------------------------------------------------------

// The command line's request.
struct StartRequest {
    StartMode mode = StartMode::only_new;
    std::optional<int64_t> step = {};  // with `resume`: continue from this step's checkpoint instead of the newest
    bool accept_changes = false;       // continue although configuration or data have changed
};

struct RunStart {
    DirectoryLock lock;                    // on rank 0: of run.dir
    std::optional<Checkpoint> checkpoint;  // the one to resume from
    TrainState state;                      // of the checkpoint or a new run, with this run's configuration and data
};

// Opens run.dir and finds the checkpoint to resume from, if any, on rank 0; the other ranks then open it too. If one
// rank fails, all do. Fails with Exit::no_input if the run must resume and has no checkpoint, or if all checkpoints
// have been set aside, since starting over would lose them; with Exit::io or Exit::permission if it cannot be
// determined whether there are checkpoints; with Exit::config, listing the differences, if a change of the
// configuration or data affects the result and `accept_changes` is false.
RunStart start_run(const Config& config, const StartRequest& request, const std::string& dataset_digest,
                   const Comm& comm);
