// Checkpoints and the directory of a run: a committed step survives killed processes, power cuts and full disks, and
// damaged bytes are never loaded.
//
//   RUN/lock                                                                  held by the running process
//   RUN/checkpoints/step_00000100/shard_0000.bin ... MANIFEST.json COMMIT     committed
//   RUN/checkpoints/tmp.00000100.1f2e3d4c/                                    being written, or left by a killed save
//   RUN/checkpoints/deleting.step_00000050/                                   being deleted by retention
//   RUN/checkpoints/damaged.step_00000090.1/, unhealthy.step_00000090.1/      set aside by find_newest_valid()
//
// A checkpoint exists if and only if its COMMIT does, which is one line: size and hash of MANIFEST.json. The order of a
// save: shard files, sync; all ranks agree; manifest, sync; COMMIT, sync; sync of the directory; rename to step_N; sync
// of the parent. Nothing committed is ever opened for writing. Saving, find_newest_valid() and apply_retention()
// require the run directory's lock.
#pragma once

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
// untouched: Exit::io (no space: says how much there is and how much is needed) or Exit::cannot_create (also when the
// step is there already).
SaveStats save_checkpoint(const std::string& run_dir, const Comm& comm, const TrainState& info,
                          const std::vector<NamedTensor>& tensors, size_t staging_bytes = kStagingBytes);

// Exit::io, with the numbers, if the run directory's disk has less than 1.2 x `bytes` (of one checkpoint) free.
// save_checkpoint() calls it; a run calls it before its first step too.
void check_space(const std::string& run_dir, size_t bytes);

// Steps to delete of these valid checkpoints so that the newest `keep` (>= 1) healthy ones of `run_id` stay. Never
// deleted: the newest one, any of another run, and the newest `keep` unhealthy ones as long as no healthy one is newer.
// An unhealthy checkpoint never causes a healthy one to be deleted. With `keep_best`, the step that has the lowest
// validation loss according to the newest of them stays too. Ascending.
std::vector<int64_t> steps_to_delete(const std::vector<TrainState>& stored, const std::string& run_id, int keep,
                                     bool keep_best = false);

// After a commit, on rank 0: deletes what steps_to_delete() names. Whether a checkpoint is valid is read anew: COMMIT,
// the manifest's hash and content, and the sizes of all shard files; those that are not valid stay, since the user may
// want to inspect them. Each deletion is first a rename to deleting.step_N, synced. Returns the deleted steps.
std::vector<int64_t> apply_retention(const std::string& run_dir, const std::string& run_id, int keep,
                                     bool keep_best = false);

// ---- loading --------------------------------------------------------------------------------------------------------

enum class OtherTensors { refuse, ignore };

// A verified checkpoint, mapped for reading.
class Checkpoint {
public:
    // Verifies COMMIT, manifest, sizes, all block CRCs and file hashes. Exit::data names file, offset, expected and
    // actual; Exit::no_input if a file is missing. Changes nothing.
    explicit Checkpoint(const std::string& directory);

    const std::string& directory() const { return directory_; }
    const Manifest& manifest() const { return manifest_; }

    // Copies to the device the part of each tensor that is here. Fails before the first byte unless every listed tensor
    // is there with this type and shape and, unless others are ignored (to load the weights alone), no other is.
    // Exit::data names the tensor.
    void load(const std::vector<NamedTensor>& tensors, OtherTensors others = OtherTensors::refuse) const;

private:
    std::string directory_;
    Manifest manifest_;
    std::vector<MappedFile> files_;
};

// COMMIT and manifest of a step and the sizes of its shard files, but not their content. Same errors as Checkpoint.
Manifest read_manifest(const std::string& directory);

std::string checkpoints_directory(const std::string& run_dir);
std::string step_directory(const std::string& run_dir, int64_t step);

// Steps that have a directory step_N, ascending. Nothing is opened.
std::vector<int64_t> committed_steps(const std::string& run_dir);

// For the start of a run that resumes, on rank 0; other ranks then open the directory it found. Removes what killed
// saves and deletions left, then goes from the newest step to older ones until one verifies and is healthy. Damaged
// ones are renamed to damaged.step_N.1, newer unhealthy ones to unhealthy.step_N.1, and `report` gets a sentence for
// each. Returns nothing if none is left. A checkpoint of a newer program and errors of the system (permission, I/O) are
// thrown, not taken for damage.
std::optional<Checkpoint> find_newest_valid(const std::string& run_dir,
                                            const std::function<void(const std::string& sentence)>& report);

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
FileDescriptor open_run_directory(const std::string& run_dir, StartMode mode);

// The first of prefix + "1", prefix + "2", ... that does not exist.
std::string first_unused(const std::string& prefix);

// ---- the start of a run ---------------------------------------------------------------------------------------------

struct RunStart {
    FileDescriptor lock;                   // rank 0's, of run.dir
    std::optional<Checkpoint> checkpoint;  // the one to resume from
    TrainState state;                      // its state, or a new run's, with this run's configuration and data
};

// Rank 0 opens run.dir and finds the checkpoint to resume from, if any; the others then open it too. If one rank fails,
// all do: Exit::no_input if the run must resume and has no checkpoint, or if all of them have been set aside, since
// starting anew would lose them; Exit::config, listing what differs, if configuration or data have changed in a way
// that changes the run and `accept_changes` is false.
RunStart start_run(const Config& config, StartMode mode, const std::string& dataset_digest, bool accept_changes,
                   const Comm& comm);
