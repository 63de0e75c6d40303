// The stages of a save, shared by foreground and background saves.
#pragma once

#include "runtime/checkpoint/checkpoint.h"  // IWYU pragma: export
#include "runtime/checkpoint/shard.h"

struct CheckpointSave {
    std::string run_dir, temporary;
    Manifest manifest;  // without the shards

    // Collective. Chooses the temporary directory's name; does not access the disk.
    static CheckpointSave plan(const std::string& run_dir, const Comm& comm, const TrainState& info,
                               const std::vector<NamedTensor>& tensors);

    size_t bytes() const;           // of all tensors
    std::string committed() const;  // the final path of the directory

    // On rank 0, first: makes the temporary directory if the disk has enough space for the checkpoint.
    void make_temporary() const;
    // On every rank: writes its shard file and the record of it. Fails as write_shard() does.
    void write_part(int rank, const CopyPart& copy_part) const;
    // On rank 0, when all parts are written: writes the manifest and COMMIT, sets aside existing checkpoints of this
    // step and later ones as superseded, and renames the directory.
    void commit() const;
    // On rank 0, after a failure on any rank: cleans up. Ignores errors, since the next start removes leftovers.
    void discard() const;
};
