// Checkpoints and the directory of a run: a committed step survives killed processes, power cuts and full disks, and
// damaged bytes are never loaded.
//
//   RUN/lock                                                                  held by the running process
//   RUN/checkpoints/step_00000100/shard_0000.bin ... MANIFEST.json COMMIT     committed
//   RUN/checkpoints/tmp.00000100.1f2e3d4c/                                    being written, or left by a killed save
//   RUN/checkpoints/deleting.step_00000050/                                   being deleted by retention
//   RUN/checkpoints/damaged.step_00000090.1/, unhealthy.step_00000090.1/      set aside by find_newest_valid()
//   RUN/checkpoints/superseded.step_00000090.1/                               of a course that the run has left
//
// A checkpoint exists if and only if its COMMIT does, which is one line: size and hash of MANIFEST.json. The order of a
// save: shard files, sync, read back; all ranks agree; manifest, sync; COMMIT, sync; sync of the directory; rename to
// step_N; sync of the parent. Nothing committed is ever opened for writing. Saving, find_newest_valid() and
// apply_retention() require the run directory's lock.
#pragma once

#include <memory>
#include <optional>

#include "kernels/comm.h"
#include "runtime/checkpoint/manifest.h"
#include "runtime/checkpoint/safetensors.h"

// ---- saving ---------------------------------------------------------------------------------------------------------

struct SaveStats {
    size_t bytes = 0;  // of tensors, all ranks
    double seconds = 0;
    std::string directory;  // the committed step
};

inline constexpr size_t kStagingBytes = 4 * kBlockBytes;

// Commits one step to `run_dir`, the same existing directory on all ranks. Called by all ranks together with the same
// `info` and the same tensors in the same order, each with its own part of them. The parts together must hold every
// element exactly once; of a tensor that all ranks have, one rank stores everything and the others have count 0.
// Tensors with larger elements come first, so that all are aligned. Takes `staging_bytes` of host memory, however large
// the model is. If one rank fails, all of them fail, the temporary directory is gone and older checkpoints are
// untouched: Exit::io (no space: says how much there is and how much is needed) or Exit::cannot_create. What is read
// back from the disk must be what was written. Checkpoints of this step and of later ones are set aside as superseded:
// the run has not continued from them (they could not be read, say).
SaveStats save_checkpoint(const std::string& run_dir, const Comm& comm, const TrainState& info,
                          const std::vector<NamedTensor>& tensors, size_t staging_bytes = kStagingBytes);

// Exit::io, with the numbers, if the run directory's disk has less than 1.2 x `bytes` (of one checkpoint) free.
// save_checkpoint() calls it; a run calls it before its first step too.
void check_space(const std::string& run_dir, size_t bytes);

// Which checkpoints of a run stay: the newest `keep` (>= 1) healthy ones and, with `keep_best`, the one with the lowest
// validation loss according to the newest. With `rollback_every`, so does the newest healthy one whose step is a
// multiple of it: the one that a run goes back to when it diverges.
struct Retention {
    int keep = 1;
    bool keep_best = false;
    int rollback_every = 0;
};

// Steps to delete of these valid checkpoints, ascending. Never deleted: the newest `keep`, healthy or not, and any of
// another run. An unhealthy checkpoint never causes a healthy one to be deleted.
std::vector<int64_t> steps_to_delete(const std::vector<TrainState>& stored, const std::string& run_id,
                                     const Retention& wanted);

// After a commit, on rank 0: deletes what steps_to_delete() names. Whether a checkpoint is valid is read anew: COMMIT,
// the manifest's hash and content, and the sizes of all shard files; those that are not valid stay, since the user may
// want to inspect them. Each deletion is first a rename to deleting.step_N, synced. Returns the deleted steps.
std::vector<int64_t> apply_retention(const std::string& run_dir, const std::string& run_id, const Retention& wanted);

// Checkpoints that are written while training goes on.
//
//     BackgroundSave saver(run_dir, comm, retention);
//     saver.reserve(gpt.saved_tensors());
//     for each step:
//         votes = saver.progress()                 // each rank's, added up over the ranks with the step's other votes
//         if (result = saver.advance(sums)) ...    // all ranks see the same result after the same step
//         if (is due) saver.begin(state, gpt.saved_tensors());
//
// begin() copies this rank's part of the tensors to host memory, which is all that a step waits for. A thread of rank 0
// then makes the directory, one of each rank writes its shard file, and one of rank 0 commits. The threads take part in
// no collective: the ranks learn from the sums how far the others are. One save is under way at most.
class BackgroundSave {
public:
    BackgroundSave(std::string run_dir, const Comm& comm, const Retention& retention);

    // Takes the memory of the copy: snapshot_bytes() of these tensors.
    void reserve(const std::vector<NamedTensor>& tensors);
    static size_t snapshot_bytes(const std::vector<NamedTensor>& tensors);

    // Begins to save one step; arguments as save_checkpoint()'s. A collective; requires that none is under way. Rank
    // 0's thread calls `before_commit` when all parts are written; if it fails, so does the save.
    void begin(const TrainState& info, const std::vector<NamedTensor>& tensors, std::function<void()> before_commit);

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

    const std::string run_dir_;
    const Comm comm_;
    const Retention retention_;
    // Shared with the threads, which may be stuck in the file system when the program ends.
    std::shared_ptr<std::vector<std::byte>> snapshot_;
    std::shared_ptr<Job> job_;  // null: none under way
};

// ---- loading --------------------------------------------------------------------------------------------------------

enum class OtherTensors { refuse, ignore };

// A verified checkpoint, open for reading.
class Checkpoint {
public:
    // Verifies COMMIT, manifest, sizes, all block CRCs and file hashes. Exit::data names file, offset, expected and
    // actual; Exit::no_input if a file is missing, Exit::io or Exit::permission if one cannot be read. Changes nothing.
    explicit Checkpoint(const std::string& directory);

    const std::string& directory() const { return directory_; }
    const Manifest& manifest() const { return manifest_; }

    // Copies to the device the part of each tensor that is here. Fails before the first byte unless every listed tensor
    // is there with this type and shape and, unless others are ignored (to load the weights alone), no other is.
    // Exit::data names the tensor. What is copied is compared with its checksum again: a disk may give other bytes now.
    void load(const std::vector<NamedTensor>& tensors, OtherTensors others = OtherTensors::refuse) const;

private:
    std::string directory_;
    Manifest manifest_;
    std::vector<InputFile> files_;
};

// COMMIT and manifest of a step and the sizes of its shard files, but not their content. Same errors as Checkpoint.
Manifest read_manifest(const std::string& directory);
// The last part of a save: MANIFEST.json, then COMMIT, each synced.
void write_manifest(const Manifest& manifest, const std::string& directory);

std::string checkpoints_directory(const std::string& run_dir);
std::string step_directory(const std::string& run_dir, int64_t step);

// Whether the directory of checkpoints is there. Exit::io or Exit::permission if that cannot be found out, also where
// it is a link that leads nowhere (an unmounted disk): that is not absence, and nothing may be started over.
bool has_checkpoints(const std::string& run_dir);

// Steps that have a directory step_N, ascending. Nothing is opened. Fails as has_checkpoints() does.
std::vector<int64_t> committed_steps(const std::string& run_dir);

// Renames the directory of a committed step to REASON.step_N.1 (or .2, ...), durably. Returns its new path.
std::string set_aside(const std::string& run_dir, int64_t step, const std::string& reason);

using Report = std::function<void(const std::string& sentence)>;

// For the start of a run that resumes, on rank 0; other ranks then open the directory it found. Removes what killed
// saves and deletions left, then goes from the newest step to older ones until one verifies and all its values are
// finite. Damaged ones and those with other values are set aside, and `report` gets a sentence for each. One that
// cannot be read because of the system (I/O, permission) is reported and left as it is. Returns nothing if none is
// left; fails with the first such error if there are only those, and as NewerVersion at a checkpoint of a newer
// program.
std::optional<Checkpoint> find_newest_valid(const std::string& run_dir, const Report& report);

// Likewise the checkpoint of this step, whatever its health; later ones are set aside as superseded. Exit::no_input if
// there is none.
Checkpoint open_step(const std::string& run_dir, int64_t step, const Report& report);

// `path` is a step directory or a run directory, whose newest sound checkpoint is then meant. Changes nothing.
// Exit::no_input if there is none; Exit::data if the named step is damaged.
Checkpoint open_checkpoint(const std::string& path);

// The run that a step directory belongs to: RUN of RUN/checkpoints/step_N.
std::string run_directory_of(const std::string& step_directory);

// For the command `inspect`: verifies a checkpoint, the checkpoints of a run or a safetensors file and describes it by
// calling print(line) for each line without newline. Tensors that differ in the layer only share a line, and so do an
// optimizer's moments, unless `all`. Returns false, with nothing printed, if the path is none of them. Exit::data, with
// what is wrong, if it is one and damaged.
bool inspect_runtime_path(const std::string& path, bool all, const std::function<void(const std::string&)>& print);

// ---- the run's directory --------------------------------------------------------------------------------------------

// The flag of the command line: none, --resume, --auto, --fresh.
enum class StartMode { only_new, resume, automatic, fresh };

// The state of run.dir; a directory that holds nothing but a lock file is empty.
enum class RunDirState { absent, empty, occupied };

// Exit::cannot_create if `run_dir` is something else than a directory.
RunDirState state_of_run_dir(const std::string& run_dir);

// Exit::usage if the directory is occupied and no flag says what to do (the message names the three), Exit::no_input if
// --resume finds no directory or an empty one.
void check_start(StartMode mode, RunDirState state, const std::string& run_dir);

// Checks the start, makes the directory, locks it, and with --fresh moves an older run to run.dir.old-N. A refusal
// leaves everything untouched. Returns the lock, to be kept for the run's whole life. Called by rank 0 alone.
DirectoryLock open_run_directory(const std::string& run_dir, StartMode mode);

// The first of prefix + "1", prefix + "2", ... that does not exist.
std::string first_unused(const std::string& prefix);

// ---- the start of a run ---------------------------------------------------------------------------------------------

// What the command line says.
struct StartRequest {
    StartMode mode = StartMode::only_new;
    std::optional<int64_t> step = {};  // with `resume`: continue from this step's checkpoint instead of the newest
    bool accept_changes = false;       // continue although configuration or data have changed
};

struct RunStart {
    DirectoryLock lock;                    // rank 0's, of run.dir
    std::optional<Checkpoint> checkpoint;  // the one to resume from
    TrainState state;                      // its state, or a new run's, with this run's configuration and data
};

// Rank 0 opens run.dir and finds the checkpoint to resume from, if any; the others then open it too. If one rank fails,
// all do: Exit::no_input if the run must resume and has no checkpoint, or if all of them have been set aside, since
// starting anew would lose them; Exit::io or Exit::permission if it cannot be found out whether there are checkpoints;
// Exit::config, listing what differs, if configuration or data have changed in a way that changes the run and
// `accept_changes` is false.
RunStart start_run(const Config& config, const StartRequest& request, const std::string& dataset_digest,
                   const Comm& comm);
