#include "runtime/checkpoint/checkpoint.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <exception>
#include <map>
#include <random>
#include <utility>

#include "kernels/check.h"
#include "runtime/checkpoint/checksum.h"
#include "runtime/checkpoint/retention.h"
#include "runtime/checkpoint/run_directory.h"

namespace {

constexpr size_t kMostCommitBytes = 128;
constexpr double kSpaceFactor = 1.2;  // room for the manifest, the log and what else the run writes meanwhile

std::string manifest_path(const std::string& directory) { return directory + "/MANIFEST.json"; }
std::string commit_path(const std::string& directory) { return directory + "/COMMIT"; }
std::string record_path(const std::string& directory, int rank) { return directory + "/" + shard_name(rank) + ".json"; }

std::string commit_line(std::string_view manifest) {
    return format("%zu %s\n", manifest.size(), xxh3_128(manifest).c_str());
}

// A commit line for an error sentence, whatever it may hold.
std::string plain(std::string line) {
    std::erase_if(line, [](unsigned char c) { return c != ' ' && !std::isalnum(c); });
    return line;
}

std::string step_name(int64_t step) { return format("step_%08lld", static_cast<long long>(step)); }

std::string name_in_path(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

std::optional<int64_t> step_of_name(const std::string& name) {
    long long step = 0;
    if (std::sscanf(name.c_str(), "step_%18lld", &step) != 1 || step < 0 || name != step_name(step)) return {};
    return step;
}

// Does one rank's part of a common action; if it fails anywhere, it fails everywhere.
template <class Part> void together(const Comm& comm, const char* action, Part part) {
    std::exception_ptr error;
    try {
        part();
    } catch (...) {
        error = std::current_exception();
    }
    int failed_rank = all_reduce_max(error ? comm.rank : -1, comm);
    if (error) std::rethrow_exception(error);
    if (failed_rank >= 0) fail(Exit::io, "checkpoint: rank %d could not %s", failed_rank, action);
}

// The same on all ranks, and not the same twice.
unsigned agreed_nonce(const Comm& comm) {
    int drawn = comm.rank == 0 ? int(std::random_device()() >> 1) : 0;
    return unsigned(all_reduce_max(drawn, comm));
}

void write_synced(const std::string& path, std::string_view content) {
    OutputFile file(path, content.size());
    file.append(content);
    file.sync();
    file.close();
}

// For cleaning up after a failure, which must not hide that failure.
void remove_quietly(const std::string& path) {
    try {
        remove_tree(path);
    } catch (const Error&) {
        // A start removes what is left over.
    }
}

size_t checkpoint_bytes(const std::vector<SaveTensor>& tensors) {
    size_t bytes = 0;
    for (const SaveTensor& tensor : tensors) bytes += bytes_of(tensor.info);
    return bytes;
}

void prepare(const std::string& run_dir, const std::string& temporary, const std::string& committed, size_t bytes) {
    if (directory_exists(committed)) fail(Exit::cannot_create, "checkpoint %s is there already", committed.c_str());
    make_directories(checkpoints_directory(run_dir));
    sync_directory(run_dir);
    check_space(run_dir, bytes);
    make_directories(temporary);
}

void write_record(const std::string& directory, int rank, const ShardFile& shard) {
    OutputFile file(record_path(directory, rank));
    file.append(shard_to_text(shard));
    file.close();
}

std::vector<ShardFile> collect_records(const std::string& directory, int ranks) {
    std::vector<ShardFile> shards;
    for (int rank = 0; rank < ranks; rank++) {
        std::string path = record_path(directory, rank);
        shards.push_back(shard_from_text(read_file(path), path));
        remove_tree(path);
    }
    return shards;
}

// The manifest's text, after a look whether it can be read back: what could not be loaded is not committed.
std::string checked_text(const Manifest& manifest, const std::string& path) {
    std::string text = manifest_to_text(manifest);
    Manifest read_back = manifest_from_text(text, path);
    require(read_back.info.state == manifest.info.state, "checkpoint: the state has a number that JSON cannot hold");
    return text;
}

void commit(const Manifest& manifest, const std::string& temporary, const std::string& committed) {
    std::string text = checked_text(manifest, manifest_path(temporary));
    write_synced(manifest_path(temporary), text);
    write_synced(commit_path(temporary), commit_line(text));
    sync_directory(temporary);
    rename_path(temporary, committed);
    try {
        sync_directory(committed + "/..");
    } catch (const Error&) {
        rename_path(committed, temporary);  // not known to survive a power cut, so not committed
        throw;
    }
}

// Maps all shards. Their sizes are right, their content is not yet verified.
std::vector<MappedFile> map_shards(const std::string& directory, const Manifest& manifest) {
    std::vector<MappedFile> files;
    for (const ShardFile& shard : manifest.shards) {
        files.emplace_back(directory + "/" + shard.name);
        if (files.back().size() != shard.bytes)
            fail(Exit::data, "%s has %zu bytes, must have %zu", files.back().path().c_str(), files.back().size(),
                 shard.bytes);
    }
    return files;
}

bool is_from_newer_program(const std::string& directory) {
    try {
        std::string text = read_file(manifest_path(directory));
        return read_file(commit_path(directory), kMostCommitBytes) == commit_line(text) &&
               is_newer_manifest(text, manifest_path(directory));
    } catch (const Error&) {
        return false;
    }
}

void remove_leftovers(const std::string& checkpoints) {
    for (const std::string& name : list_directory(checkpoints))
        if (name.starts_with("tmp.") || name.starts_with("deleting.")) remove_tree(checkpoints + "/" + name);
}

// "damaged.step_00000100.1"
std::string set_aside(const std::string& run_dir, int64_t step, const std::string& reason) {
    std::string parent = checkpoints_directory(run_dir);
    std::string aside = first_unused(parent + "/" + reason + "." + step_name(step) + ".");
    rename_path(step_directory(run_dir, step), aside);
    sync_directory(parent);
    return aside;
}

// What stands in the way of resuming from a step; empty, and `checkpoint` filled, if nothing does.
std::string obstacle(const std::string& directory, std::optional<Checkpoint>& checkpoint) {
    try {
        checkpoint.emplace(directory);
        return {};
    } catch (const Error& error) {
        bool is_damage = error.code == Exit::data || error.code == Exit::no_input;
        if (!is_damage || is_from_newer_program(directory)) throw;
        return error.what();
    }
}

StoredCheckpoint reread(const std::string& run_dir, int64_t step) {
    try {
        CheckpointInfo info = read_manifest(step_directory(run_dir, step)).info;
        return {.step = step, .run_id = info.run_id, .valid = true, .healthy = info.healthy};
    } catch (const Error&) {
        return {.step = step, .run_id = {}, .valid = false, .healthy = false};
    }
}

void delete_step(const std::string& run_dir, int64_t step) {
    std::string parent = checkpoints_directory(run_dir);
    std::string doomed = parent + "/deleting." + step_name(step);
    remove_tree(doomed);  // an earlier deletion that failed half-way
    rename_path(step_directory(run_dir, step), doomed);
    sync_directory(parent);
    remove_tree(doomed);
}

// A wanted tensor must be what is stored, and lie within it.
void check_wanted(const LoadTensor& wanted, const TensorInfo& stored, const std::string& directory) {
    auto describe = [](const TensorInfo& tensor) {
        std::string text = name_of(tensor.dtype);
        for (size_t dim : tensor.shape) text.append(" ").append(std::to_string(dim));
        return text;
    };
    const char* name = stored.name.c_str();
    if (wanted.info != stored)
        fail(Exit::data, "%s: tensor %s is %s, must be %s", directory.c_str(), name, describe(stored).c_str(),
             describe(wanted.info).c_str());
    size_t elements = elements_of(stored);
    require(wanted.first <= elements && wanted.count <= elements - wanted.first,
            "%s: elements [%zu, %zu + %zu) of tensor %s are wanted, it has %zu", directory.c_str(), wanted.first,
            wanted.first, wanted.count, name, elements);
}

struct StoredPiece {
    const std::byte* data;
    size_t first, count;  // elements
};

// Pieces by tensor, each tensor's by ascending element.
std::map<std::string, std::vector<StoredPiece>> pieces_by_tensor(const Manifest& manifest,
                                                                 const std::vector<MappedFile>& files) {
    std::map<std::string, std::vector<StoredPiece>> pieces;
    for (size_t i = 0; i < files.size(); i++)
        for (const Piece& piece : manifest.shards[i].pieces)
            pieces[piece.tensor].push_back({files[i].data() + piece.file_offset, piece.first, piece.count});
    for (auto& [name, list] : pieces)
        std::sort(list.begin(), list.end(), [](auto& a, auto& b) { return a.first < b.first; });
    return pieces;
}

void deliver(const LoadTensor& wanted, const std::vector<StoredPiece>& pieces) {
    size_t wanted_end = wanted.first + wanted.count;
    for (const StoredPiece& piece : pieces) {
        size_t begin = std::max(piece.first, wanted.first), end = std::min(piece.first + piece.count, wanted_end);
        if (begin >= end) continue;
        wanted.write(piece.data + (begin - piece.first) * size_of(wanted.info.dtype), begin, end - begin);
    }
}

}  // namespace

CheckpointWriter::CheckpointWriter(std::string run_dir, const Comm& comm, size_t staging_bytes)
    : run_dir_(std::move(run_dir)), comm_(comm), staging_(staging_bytes) {}

SaveStats CheckpointWriter::save(const CheckpointInfo& info, const std::vector<SaveTensor>& tensors) {
    auto start = std::chrono::steady_clock::now();
    std::string committed = step_directory(run_dir_, info.step);
    std::string temporary = format("%s/tmp.%08lld.%08x", checkpoints_directory(run_dir_).c_str(),
                                   static_cast<long long>(info.step), agreed_nonce(comm_));
    Manifest manifest{.info = info, .world_size = comm_.size, .tensors = {}, .shards = {}};
    for (const SaveTensor& tensor : tensors) manifest.tensors.push_back(tensor.info);
    try {
        together(comm_, "make the directory", [&] {
            if (comm_.rank == 0) prepare(run_dir_, temporary, committed, checkpoint_bytes(tensors));
        });
        ShardFile shard;
        together(comm_, "write its part", [&] {
            shard = write_shard(temporary, comm_.rank, tensors, staging_);
            write_record(temporary, comm_.rank, shard);
        });
        manifest.info.healthy &= all_reduce_max(shard.finite ? 0 : 1, comm_) == 0;
        together(comm_, "commit", [&] {
            if (comm_.rank != 0) return;
            manifest.shards = collect_records(temporary, comm_.size);
            commit(manifest, temporary, committed);
        });
    } catch (...) {
        if (comm_.rank == 0) remove_quietly(temporary);
        throw;
    }
    std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    return {checkpoint_bytes(tensors), elapsed.count(), manifest.info.healthy, committed};
}

Checkpoint::Checkpoint(const std::string& directory)
    : directory_(directory), manifest_(read_manifest(directory)), files_(map_shards(directory, manifest_)) {
    for (size_t i = 0; i < files_.size(); i++) verify_shard(files_[i], manifest_.shards[i]);
}

void Checkpoint::load(const std::vector<LoadTensor>& tensors, OtherTensors others) const {
    std::map<std::string, const TensorInfo*> stored;
    for (const TensorInfo& tensor : manifest_.tensors) stored[tensor.name] = &tensor;
    for (const LoadTensor& tensor : tensors) {
        auto found = stored.find(tensor.info.name);
        if (found == stored.end())
            fail(Exit::data, "%s has no tensor %s", directory_.c_str(), tensor.info.name.c_str());
        require(found->second, "tensor %s is asked for twice", tensor.info.name.c_str());
        check_wanted(tensor, *std::exchange(found->second, nullptr), directory_);
    }
    for (auto& [name, left_over] : stored)
        if (left_over && others == OtherTensors::refuse)
            fail(Exit::data, "%s has tensor %s, which this run does not know", directory_.c_str(), name.c_str());

    auto pieces = pieces_by_tensor(manifest_, files_);
    for (const LoadTensor& tensor : tensors) deliver(tensor, pieces[tensor.info.name]);
}

Manifest read_manifest(const std::string& directory) {
    std::string path = manifest_path(directory);
    std::string said = read_file(commit_path(directory), kMostCommitBytes);
    std::string text = read_file(path);
    if (std::string is = commit_line(text); said != is)
        fail(Exit::data, "%s is not what %s says: size and hash are %s, must be %s", path.c_str(),
             commit_path(directory).c_str(), plain(is).c_str(), plain(said).c_str());
    Manifest manifest = manifest_from_text(text, path);
    auto step = step_of_name(name_in_path(directory));
    if (step && *step != manifest.info.step)
        fail(Exit::data, "%s holds step %lld", directory.c_str(), static_cast<long long>(manifest.info.step));
    map_shards(directory, manifest);
    return manifest;
}

std::string checkpoints_directory(const std::string& run_dir) { return run_dir + "/checkpoints"; }

std::string step_directory(const std::string& run_dir, int64_t step) {
    return checkpoints_directory(run_dir) + "/" + step_name(step);
}

std::vector<int64_t> committed_steps(const std::string& run_dir) {
    std::vector<int64_t> steps;
    if (!directory_exists(checkpoints_directory(run_dir))) return steps;
    for (const std::string& name : list_directory(checkpoints_directory(run_dir)))
        if (auto step = step_of_name(name)) steps.push_back(*step);
    std::sort(steps.begin(), steps.end());
    return steps;
}

void check_space(const std::string& run_dir, size_t bytes) {
    std::string checkpoints = checkpoints_directory(run_dir);
    std::string place = directory_exists(checkpoints) ? checkpoints : run_dir;
    uint64_t available = free_bytes(place);
    uint64_t needed = uint64_t(kSpaceFactor * double(bytes));
    if (available < needed)
        fail(Exit::io, "%s: a checkpoint of %zu bytes needs %llu bytes of free space, there are %llu", place.c_str(),
             bytes, static_cast<unsigned long long>(needed), static_cast<unsigned long long>(available));
}

std::optional<Checkpoint> find_newest_valid(const std::string& run_dir,
                                            const std::function<void(const std::string& sentence)>& report) {
    if (!directory_exists(checkpoints_directory(run_dir))) return {};
    remove_leftovers(checkpoints_directory(run_dir));
    std::vector<int64_t> steps = committed_steps(run_dir);
    for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
        std::optional<Checkpoint> checkpoint;
        std::string damage = obstacle(step_directory(run_dir, *step), checkpoint);
        if (checkpoint && checkpoint->manifest().info.healthy) return checkpoint;
        std::string reason = checkpoint ? "not healthy, see its manifest" : damage;
        std::string aside = set_aside(run_dir, *step, checkpoint ? "unhealthy" : "damaged");
        report(format("checkpoint of step %lld is set aside as %s: %s", static_cast<long long>(*step), aside.c_str(),
                      reason.c_str()));
    }
    return {};
}

std::vector<int64_t> apply_retention(const std::string& run_dir, const std::string& run_id, int keep) {
    std::vector<StoredCheckpoint> stored;
    for (int64_t step : committed_steps(run_dir)) stored.push_back(reread(run_dir, step));
    std::vector<int64_t> superfluous = steps_to_delete(stored, run_id, keep);
    for (int64_t step : superfluous) delete_step(run_dir, step);
    return superfluous;
}
