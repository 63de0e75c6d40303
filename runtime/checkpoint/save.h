// A checkpoint on its way to the disk, as the phases that a save in the foreground and one in the background share.
#pragma once

#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/shard.h"

// Does this rank's part of a common action. If it fails on one rank, it fails on all: there with its own error, and on
// the others with Exit::io.
void on_all_ranks(const Comm& comm, const char* action, const std::function<void()>& part);

struct CheckpointSave {
    std::string run_dir, temporary;
    Manifest manifest;  // without the shards

    // Collective. Draws the temporary directory's name; the disk is not touched.
    static CheckpointSave plan(const std::string& run_dir, const Comm& comm, const TrainState& info,
                               const std::vector<NamedTensor>& tensors);

    size_t bytes() const;           // of all tensors
    std::string committed() const;  // the directory's name once it is committed

    // On rank 0, first: makes the temporary directory if there is room for the checkpoint.
    void make_temporary() const;
    // On every rank: its shard file and the record of it. Fails as write_shard() does.
    void write_part(int rank, size_t staging_bytes, const CopyPart& copy_part) const;
    // On rank 0, when all parts are written: manifest, COMMIT, rename. Checkpoints of this step or later ones, which
    // were not resumed from, are set aside as superseded.
    void commit() const;
    // On rank 0, after a failure on any rank. A failure to clean up is ignored: the next start removes the remains.
    void abandon() const;
};
