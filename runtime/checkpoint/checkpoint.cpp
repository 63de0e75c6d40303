#include "runtime/checkpoint/checkpoint.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "kernels/check.h"
#include "kernels/device.h"
#include "runtime/checkpoint/shard.h"

namespace {

constexpr size_t kMostCommitBytes = 128;
constexpr double kSpaceFactor = 1.2;  // room for the manifest, the log and whatever else the run writes meanwhile

std::string manifest_path(const std::string& directory) { return directory + "/MANIFEST.json"; }
std::string commit_path(const std::string& directory) { return directory + "/COMMIT"; }
std::string record_path(const std::string& directory, int rank) { return directory + "/" + shard_name(rank) + ".json"; }

std::string commit_line(std::string_view manifest) {
    return format("%zu %s\n", manifest.size(), xxh3_128(manifest).c_str());
}

std::string step_name(int64_t step) { return format("step_%08ld", step); }

std::optional<int64_t> step_of_name(const std::string& name) {
    int64_t step = 0;
    if (std::sscanf(name.c_str(), "step_%18ld", &step) != 1 || step < 0 || name != step_name(step)) return {};
    return step;
}

// Does this rank's part of a common action. If it fails on one rank, it fails on all.
template <class Part> void on_all_ranks(const Comm& comm, const char* action, Part part) {
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

// tmp.STEP.RANDOM, the same on all ranks.
std::string temporary_directory(const std::string& run_dir, int64_t step, const Comm& comm) {
    const std::string drawn = broadcast_text(random_hex(4), comm);
    return format("%s/tmp.%08ld.%s", checkpoints_directory(run_dir).c_str(), step, drawn.c_str());
}

void prepare(const std::string& run_dir, const std::string& temporary, const std::string& committed, size_t bytes) {
    if (directory_exists(committed)) fail(Exit::cannot_create, "checkpoint %s is there already", committed);
    make_directories(checkpoints_directory(run_dir));
    sync_directory(run_dir);
    check_space(run_dir, bytes);
    make_directories(temporary);
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

void commit(const Manifest& manifest, const std::string& temporary, const std::string& committed) {
    const std::string text = manifest_to_text(manifest);
    // Reads the text back, so that no checkpoint is committed that could not be loaded.
    manifest_from_text(text, manifest_path(temporary));
    write_file_atomically(manifest_path(temporary), text);
    write_file_atomically(commit_path(temporary), commit_line(text));
    rename_path(temporary, committed);
    try {
        sync_directory(directory_of(committed));
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
            fail(Exit::data, "%s has %zu bytes, must have %zu", files.back().path(), files.back().size(), shard.bytes);
    }
    return files;
}

// Gives the directory of a committed step another path.
void move_step(const std::string& run_dir, int64_t step, const std::string& path) {
    rename_path(step_directory(run_dir, step), path);
    sync_directory(directory_of(path));
}

std::string type_and_shape(const NamedTensor& tensor) {
    return name_of(tensor.values.dtype) + (" " + shape_text(tensor.shape));
}

// Requires that a requested tensor has the stored type and shape, and that its part lies within it.
void check_wanted(const NamedTensor& wanted, const NamedTensor& stored, const std::string& directory) {
    const char* name = stored.name.c_str();
    if (type_and_shape(wanted) != type_and_shape(stored))
        fail(Exit::data, "%s: tensor %s is %s, must be %s", directory, name, type_and_shape(stored),
             type_and_shape(wanted));
    const size_t elements = elements_of(stored);
    require(wanted.first <= elements && wanted.count <= elements - wanted.first,
            "%s: elements [%zu, %zu + %zu) of tensor %s are wanted, it has %zu", directory, wanted.first, wanted.first,
            wanted.count, name, elements);
}

// Copies to the device the requested elements that a piece, whose bytes are at `data`, holds.
void copy_overlap(const NamedTensor& wanted, const Piece& piece, const std::byte* data) {
    const size_t begin = std::max(piece.first, wanted.first);
    const size_t end = std::min(piece.first + piece.count, wanted.first + wanted.count);
    const size_t element = size_of(wanted.values.dtype);
    if (begin < end)
        copy_to_device(wanted.values.from(begin - wanted.first).data, data + (begin - piece.first) * element,
                       (end - begin) * element, Stream{});
}

}  // namespace

SaveStats save_checkpoint(const std::string& run_dir, const Comm& comm, const TrainState& info,
                          const std::vector<NamedTensor>& tensors, size_t staging_bytes) {
    const double start_ms = now_ms();
    const std::string committed = step_directory(run_dir, info.step);
    const std::string temporary = temporary_directory(run_dir, info.step, comm);
    Manifest manifest{.info = info, .world_size = comm.size, .tensors = tensors, .shards = {}};
    size_t bytes = 0;
    for (const NamedTensor& tensor : tensors) bytes += bytes_of(tensor);
    try {
        on_all_ranks(comm, "make the directory", [&] {
            if (comm.rank == 0) prepare(run_dir, temporary, committed, bytes);
        });
        bool is_finite = true;
        on_all_ranks(comm, "write its part", [&] {
            const ShardFile shard = write_shard(temporary, comm.rank, tensors, staging_bytes);
            is_finite = shard.finite;
            OutputFile record(record_path(temporary, comm.rank));
            record.append(shard_to_text(shard));
            record.close();
        });
        manifest.info.healthy &= all_reduce_max(is_finite ? 0 : 1, comm) == 0;
        on_all_ranks(comm, "commit", [&] {
            if (comm.rank != 0) return;
            manifest.shards = collect_records(temporary, comm.size);
            commit(manifest, temporary, committed);
        });
    } catch (...) {
        // A failure to clean up must not hide the first error; the next start removes the remains.
        std::error_code ignored;
        if (comm.rank == 0) std::filesystem::remove_all(temporary, ignored);
        throw;
    }
    return {bytes, (now_ms() - start_ms) / 1000, committed};
}

Checkpoint::Checkpoint(const std::string& directory)
    : directory_(directory), manifest_(read_manifest(directory)), files_(map_shards(directory, manifest_)) {
    for (size_t i = 0; i < files_.size(); i++) verify_shard(files_[i], manifest_.shards[i]);
}

void Checkpoint::load(const std::vector<NamedTensor>& tensors, OtherTensors others) const {
    std::map<std::string_view, const NamedTensor*> stored, wanted;
    for (const NamedTensor& tensor : manifest_.tensors) stored[tensor.name] = &tensor;
    for (const NamedTensor& tensor : tensors) {
        const char* name = tensor.name.c_str();
        require(wanted.emplace(tensor.name, &tensor).second, "tensor %s is wanted twice", name);
        if (!stored.contains(tensor.name)) fail(Exit::data, "%s has no tensor %s", directory_, name);
        check_wanted(tensor, *stored[tensor.name], directory_);
    }
    for (const auto& [name, tensor] : stored)
        if (others == OtherTensors::refuse && !wanted.contains(name))
            fail(Exit::data, "%s has tensor %s, which this run does not know", directory_, tensor->name);
    for (size_t i = 0; i < files_.size(); i++)
        for (const Piece& piece : manifest_.shards[i].pieces)
            if (const auto tensor = wanted.find(piece.tensor); tensor != wanted.end())
                copy_overlap(*tensor->second, piece, files_[i].data() + piece.file_offset);
}

Manifest read_manifest(const std::string& directory) {
    std::string path = manifest_path(directory);
    std::string said = read_file(commit_path(directory), kMostCommitBytes);
    std::string text = read_file(path);
    if (std::string is = commit_line(text); said != is)
        fail(Exit::data, "%s is not what %s says: size and hash are %s, must be %s", path, commit_path(directory),
             printed(is), printed(said));
    Manifest manifest = manifest_from_text(text, path);
    auto step = step_of_name(std::filesystem::path(directory).filename());
    if (step && *step != manifest.info.step) fail(Exit::data, "%s holds step %d", directory, manifest.info.step);
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
        fail(Exit::io, "%s: a checkpoint of %zu bytes needs %llu bytes of free space, there are %llu", place, bytes,
             static_cast<unsigned long long>(needed), static_cast<unsigned long long>(available));
}

std::optional<Checkpoint> find_newest_valid(const std::string& run_dir,
                                            const std::function<void(const std::string& sentence)>& report) {
    const std::string checkpoints = checkpoints_directory(run_dir);
    if (!directory_exists(checkpoints)) return {};
    for (const std::string& name : list_directory(checkpoints))
        if (name.starts_with("tmp.") || name.starts_with("deleting.")) remove_tree(checkpoints + "/" + name);
    std::vector<int64_t> steps = committed_steps(run_dir);
    for (; !steps.empty(); steps.pop_back()) {
        std::string kind = "unhealthy", reason = "not healthy, see its manifest";
        try {
            Checkpoint checkpoint(step_directory(run_dir, steps.back()));
            if (checkpoint.manifest().info.healthy) return checkpoint;
        } catch (const NewerVersion&) {
            throw;
        } catch (const Error& error) {
            if (error.code != Exit::data && error.code != Exit::no_input) throw;
            kind = "damaged", reason = error.what();
        }
        const std::string aside = first_unused(checkpoints + "/" + kind + "." + step_name(steps.back()) + ".");
        move_step(run_dir, steps.back(), aside);
        report(format("checkpoint of step %ld is set aside as %s: %s", steps.back(), aside.c_str(), reason.c_str()));
    }
    return {};
}

std::vector<int64_t> steps_to_delete(const std::vector<TrainState>& stored, const std::string& run_id, int keep,
                                     bool keep_best) {
    require(keep >= 1, "retention: at least one checkpoint must be kept, not %d", keep);
    int newest_step = -1, best_step = 0;
    for (const TrainState& own : stored)
        if (own.run_id == run_id && own.step > newest_step) newest_step = own.step, best_step = own.progress.best.step;
    std::vector<int64_t> superfluous;
    for (const TrainState& candidate : stored) {
        auto newer = [&](bool healthy) {
            return std::ranges::count_if(stored, [&](const TrainState& other) {
                return other.run_id == run_id && other.step > candidate.step && other.healthy == healthy;
            });
        };
        // An unhealthy one matters until a healthy one follows it.
        const bool matters = (newer(candidate.healthy) < keep && (candidate.healthy || newer(true) == 0)) ||
                             (keep_best && candidate.step == best_step);
        if (candidate.run_id == run_id && !matters) superfluous.push_back(candidate.step);
    }
    std::ranges::sort(superfluous);
    return superfluous;
}

std::vector<int64_t> apply_retention(const std::string& run_dir, const std::string& run_id, int keep, bool keep_best) {
    std::vector<TrainState> valid;
    for (int64_t step : committed_steps(run_dir)) {
        try {
            valid.push_back(read_manifest(step_directory(run_dir, step)).info);
        } catch (const Error&) {
            // Not valid, so it is kept.
        }
    }
    const std::vector<int64_t> superfluous = steps_to_delete(valid, run_id, keep, keep_best);
    for (int64_t step : superfluous) {
        const std::string doomed = checkpoints_directory(run_dir) + "/deleting." + step_name(step);
        remove_tree(doomed);  // an earlier deletion that failed half-way
        move_step(run_dir, step, doomed);
        remove_tree(doomed);
    }
    return superfluous;
}
