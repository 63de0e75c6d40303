// Checkpoints: whatever is killed, unplugged or filled up, a committed step is whole, and no wrong byte is loaded.
//
//   RUN/checkpoints/step_00000100/shard_0000.bin ... MANIFEST.json COMMIT     committed
//   RUN/checkpoints/tmp.00000100.1f2e3d4c/                                    being written, or left by a dead save
//   RUN/checkpoints/deleting.step_00000050/                                   being deleted by retention
//   RUN/checkpoints/damaged.step_00000090.1/, unhealthy.step_00000090.1/      set aside by find_newest_valid()
//
// A checkpoint exists if and only if its COMMIT does, which is one line: size and hash of MANIFEST.json. The order of a
// save: shards, sync; all ranks agree; manifest, sync; COMMIT, sync; sync of the directory; rename to step_N; sync of
// the parent. Nothing committed is ever opened for writing. Whoever saves or calls find_newest_valid() or
// apply_retention() holds the run directory's lock (run_directory.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kernels/comm.h"
#include "runtime/checkpoint/manifest.h"
#include "runtime/checkpoint/shard.h"
#include "runtime/io/io.h"

struct SaveStats {
    size_t bytes = 0;  // of tensors, all ranks
    double seconds = 0;
    bool healthy = true;    // as written into the manifest
    std::string directory;  // the committed step
};

// Saves checkpoints of one run. Owns the staging buffer, so that a save needs no memory that grows with the model.
class CheckpointWriter {
public:
    static constexpr size_t kStagingBytes = 4 * kChunkBytes;

    // `run_dir` is the same directory on all ranks and exists.
    CheckpointWriter(std::string run_dir, const Comm& comm, size_t staging_bytes = kStagingBytes);

    // Commits one step; called by all ranks together with the same `info` and the same tensors in the same order, each
    // with its own ranges. If one rank fails, all of them fail, the temporary directory is gone and older checkpoints
    // are untouched: Exit::io (no space: says how much there is and how much is needed) or Exit::cannot_create (also
    // when the step is there already).
    SaveStats save(const CheckpointInfo& info, const std::vector<SaveTensor>& tensors);

private:
    std::string run_dir_;
    Comm comm_;
    std::vector<std::byte> staging_;
};

enum class OtherTensors { refuse, ignore };

// A verified checkpoint, mapped for reading.
class Checkpoint {
public:
    // Verifies COMMIT, manifest, sizes, all chunk CRCs and file hashes. Exit::data names file, offset, expected and
    // actual; Exit::no_input if a file is missing. Changes nothing.
    explicit Checkpoint(const std::string& directory);

    const std::string& directory() const { return directory_; }
    const Manifest& manifest() const { return manifest_; }

    // Hands over the wanted ranges. Before the first byte: every listed tensor is there with this type and shape, and,
    // unless others are ignored (for who wants the weights alone), no other is. Exit::data names the tensor.
    void load(const std::vector<LoadTensor>& tensors, OtherTensors others = OtherTensors::refuse) const;

private:
    std::string directory_;
    Manifest manifest_;
    std::vector<MappedFile> files_;
};

// COMMIT and manifest of a step and the sizes of its shards, but not their content. Same errors as Checkpoint.
Manifest read_manifest(const std::string& directory);

std::string checkpoints_directory(const std::string& run_dir);
std::string step_directory(const std::string& run_dir, int64_t step);

// Steps that have a directory step_N, ascending. Nothing is opened.
std::vector<int64_t> committed_steps(const std::string& run_dir);

// Exit::io, with the numbers, if the run directory's disk has less than 1.2 x `bytes` (of one checkpoint) free. save()
// asks it; a run asks it before its first step too.
void check_space(const std::string& run_dir, size_t bytes);

// For the start of a run that resumes, on rank 0; other ranks then open the directory it found. Removes what dead saves
// and deletions left, then goes from the newest step to older ones until one verifies and is healthy. Damaged ones are
// renamed to damaged.step_N.1, newer unhealthy ones to unhealthy.step_N.1, and `report` gets a sentence for each.
// Nothing left: nullopt. A checkpoint of a newer program and errors of the system (permission, I/O) are thrown, not
// taken for damage.
std::optional<Checkpoint> find_newest_valid(const std::string& run_dir,
                                            const std::function<void(const std::string& sentence)>& report);

// After a commit, on rank 0: deletes what steps_to_delete() (retention.h) names. What counts as valid has been re-read
// here and now: COMMIT, the manifest's hash and content, and the sizes of all shards. Each deletion is first a rename
// to deleting.step_N, synced. Returns the deleted steps.
std::vector<int64_t> apply_retention(const std::string& run_dir, const std::string& run_id, int keep);
