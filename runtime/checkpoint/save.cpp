#include "runtime/checkpoint/save.h"

#include <exception>
#include <filesystem>

#include "runtime/io/digest.h"
#include "runtime/io/files.h"
#include "runtime/io/process.h"

namespace {

constexpr double kSpaceFactor = 1.2;  // leaves space for the manifest, the log and other files that the run writes

std::string record_path(const std::string& directory, int rank) { return directory + "/" + shard_name(rank) + ".json"; }

// Writes a rank's record of its shard file after a hash of the record, so that corruption on the way to rank 0 does not
// get into the manifest.
void write_record(const std::string& path, const ShardFile& shard) {
    const std::string text = shard_to_text(shard);
    OutputFile record(path);
    record.append(xxh3_128(text) + "\n" + text);
    record.close();
}

ShardFile read_record(const std::string& path) {
    const std::string content = read_file(path);
    const size_t line = content.find('\n');
    const std::string text = line == content.npos ? "" : content.substr(line + 1);
    if (content.substr(0, line) != xxh3_128(text))
        fail(Exit::io, "%s: the data read back differs from the data written", path);
    return shard_from_text(text, path);
}

// Runs this rank's part of a collective action. If it fails on one rank, it fails on all: with the original error on
// that rank, with Exit::io on the others.
void on_all_ranks(const Comm& comm, const char* action, const std::function<void()>& part) {
    std::exception_ptr error;
    try {
        part();
    } catch (...) {
        error = std::current_exception();
    }
    const int failed_rank = all_reduce_max(error ? comm.rank : -1, comm);
    if (error) std::rethrow_exception(error);
    if (failed_rank >= 0) fail(Exit::io, "checkpoint: rank %d could not %s", failed_rank, action);
}

}  // namespace

CheckpointSave CheckpointSave::plan(const std::string& run_dir, const Comm& comm, const TrainState& info,
                                    const std::vector<NamedTensor>& tensors) {
    // tmp.STEP.RANDOM, the same on all ranks.
    const int drawn = all_reduce_max(comm.rank == 0 ? int(std::stoul(random_hex(4), nullptr, 16) >> 1) : 0, comm);
    const std::string name = format("/tmp.%08d.%08x", info.step, unsigned(drawn));
    return {run_dir, checkpoints_directory(run_dir) + name, {info, comm.size, tensors, {}}};
}

size_t CheckpointSave::bytes() const {
    size_t bytes = 0;
    for (const NamedTensor& tensor : manifest.tensors) bytes += bytes_of(tensor);
    return bytes;
}

std::string CheckpointSave::committed() const { return step_directory(run_dir, manifest.info.step); }

void CheckpointSave::make_temporary() const {
    make_directory(checkpoints_directory(run_dir));  // does not create run.dir, which may have been moved away
    sync_directory(run_dir);
    check_space(run_dir, bytes());
    make_directory(temporary);
}

void CheckpointSave::write_part(int rank, const CopyPart& copy_part) const {
    write_record(record_path(temporary, rank), write_shard(temporary, rank, manifest.tensors, copy_part));
}

void CheckpointSave::commit() const {
    Manifest whole = manifest;
    for (int rank = 0; rank < manifest.world_size; rank++) {
        const std::string path = record_path(temporary, rank);
        whole.shards.push_back(read_record(path));
        remove_tree(path);
    }
    whole.info.healthy &= whole.is_finite();
    write_manifest(whole, temporary);
    for (const int64_t step : committed_steps(run_dir))
        if (step >= manifest.info.step) set_aside(run_dir, step, "superseded");
    rename_path(temporary, committed());
    try {
        sync_directory(directory_of(committed()));
    } catch (const Error&) {
        rename_path(committed(), temporary);  // may not survive a power cut, so it must not count as committed
        throw;
    }
}

void CheckpointSave::discard() const {
    std::error_code ignored;
    std::filesystem::remove_all(temporary, ignored);
}

SaveStats save_checkpoint(const std::string& run_dir, const Comm& comm, const TrainState& info,
                          const std::vector<NamedTensor>& tensors) {
    const double start_ms = now_ms();
    const CheckpointSave save = CheckpointSave::plan(run_dir, comm, info, tensors);
    on_all_ranks(comm, "make the directory", [&] {
        if (comm.rank == 0) save.make_temporary();
    });
    try {
        on_all_ranks(comm, "write its part", [&] { save.write_part(comm.rank, copy_part_from_device); });
        on_all_ranks(comm, "commit", [&] {
            if (comm.rank == 0) save.commit();
        });
    } catch (...) {
        if (comm.rank == 0) save.discard();
        throw;
    }
    return {save.bytes(), (now_ms() - start_ms) / 1000, save.committed()};
}

void check_space(const std::string& run_dir, size_t bytes) {
    std::string checkpoints = checkpoints_directory(run_dir);
    std::string place = directory_exists(checkpoints) ? checkpoints : run_dir;
    uint64_t available = free_bytes(place);
    uint64_t needed = uint64_t(kSpaceFactor * double(bytes));
    if (available < needed)
        fail(Exit::io, "%s: a checkpoint of %zu bytes needs %lu bytes of free space, %lu available", place, bytes,
             needed, available);
}
