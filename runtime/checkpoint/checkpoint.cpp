#include "runtime/checkpoint/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <map>

#include "runtime/checkpoint/shard.h"
#include "runtime/io/digest.h"
#include "runtime/io/joined.h"
#include "runtime/io/json.h"
#include "runtime/io/process.h"

namespace {

constexpr size_t kMaxCommitBytes = 128;
std::string manifest_path(const std::string& directory) { return directory + "/MANIFEST.json"; }
std::string commit_path(const std::string& directory) { return directory + "/COMMIT"; }

std::string commit_line(std::string_view text) { return format("%zu %s\n", text.size(), xxh3_128(text).c_str()); }

std::string step_name(int64_t step) { return format("step_%08ld", step); }

std::optional<int64_t> step_of_name(const std::string& name) {
    int64_t step = 0;
    if (std::sscanf(name.c_str(), "step_%18ld", &step) != 1 || step < 0 || name != step_name(step)) return {};
    return step;
}

// Opens all shard files and checks their sizes, not their content.
std::vector<InputFile> open_shards(const std::string& directory, const Manifest& manifest) {
    std::vector<InputFile> files;
    for (const ShardFile& shard : manifest.shards) {
        files.emplace_back(directory + "/" + shard.name);
        if (files.back().size() != shard.bytes)
            fail(Exit::data, "%s has %zu bytes, must have %zu", files.back().path(), files.back().size(), shard.bytes);
    }
    return files;
}

std::string type_and_shape(const NamedTensor& tensor) {
    return name_of(tensor.values.dtype) + (" " + shape_text(tensor.shape));
}

bool is_of_weights(Dtype type) { return type == Dtype::fp32 || type == Dtype::bf16; }

// Fails unless the requested tensor has the stored shape and type, or a type of weights, if `converts`. Requires that
// its part lies within the tensor.
void check_wanted(const NamedTensor& wanted, const NamedTensor& stored, bool converts, const std::string& directory) {
    const bool fits = converts && is_of_weights(wanted.values.dtype) && is_of_weights(stored.values.dtype);
    if (wanted.shape != stored.shape || (wanted.values.dtype != stored.values.dtype && !fits))
        fail(Exit::data, "%s: tensor %s is %s, must be %s", directory, stored.name, type_and_shape(stored),
             type_and_shape(wanted));
    size_t count = 0;
    for (const Piece& piece : pieces_of(wanted)) count += is_within(piece, stored.shape) ? piece.count : 0;
    require(count == wanted.count, "%s: elements [%zu, %zu + %zu) of tensor %s requested, it has %zu", directory,
            wanted.first, wanted.first, wanted.count, stored.name, elements_of(stored));
}

// Copies parts of one shard file to the device block by block, converts weights to the type there, and verifies the
// checksum of each block. Elements do not straddle blocks, because a file's tensors are aligned to their types.
class VerifiedCopy {
public:
    VerifiedCopy(const InputFile& file, const ShardFile& shard) : file_(file), shard_(shard) {}

    // Copies what a piece of the file has of the requested tensor. `type` is the type of the stored elements.
    void copy(const NamedTensor& wanted, Dtype type, const Piece& stored) {
        size_t begin = 0;  // of the wanted piece, among the wanted elements
        for (const Piece& piece : pieces_of(wanted)) {
            for_each_common_run(stored, piece, wanted.shape, [&](size_t from, size_t to, size_t count) {
                const size_t offset = stored.file_offset + from * size_of(type);
                copy_run(offset, offset + count * size_of(type), type, wanted.values.from(begin + to));
            });
            begin += piece.count;
        }
    }

private:
    // Copies the elements at bytes [at, end) of the file.
    void copy_run(size_t at, size_t end, Dtype type, View to) {
        for (size_t count; at < end; at += count * size_of(type), to = to.from(count)) {
            if (at < begin_ || at >= end_) read_block(at / kBlockBytes);
            count = (std::min(end, end_) - at) / size_of(type);
            copy_elements(to, {block_.data() + (at - begin_), type}, count);
        }
    }

    static void copy_elements(View to, ConstView from, size_t count) {
        if (from.dtype == to.dtype) return copy_to_device(to.data, from.data, count * size_of(to.dtype), Stream{});
        const std::vector<float> values = host_floats(from, count);
        set_floats(to, values.data(), values.size());
    }

    void read_block(size_t block) {
        begin_ = block * kBlockBytes;
        end_ = begin_ + read_verified_block(file_, shard_, block, block_.data());
    }

    const InputFile& file_;
    const ShardFile& shard_;
    std::vector<std::byte> block_ = std::vector<std::byte>(std::min(kBlockBytes, shard_.bytes));
    size_t begin_ = 0, end_ = 0;  // of the block, in the file; equal: no block has been read yet
};

}  // namespace

Checkpoint::Checkpoint(const std::string& directory)
    : directory_(directory), manifest_(read_manifest(directory)), files_(open_shards(directory, manifest_)) {
    for (size_t i = 0; i < files_.size(); i++) verify_shard(files_[i], manifest_.shards[i]);
}

void Checkpoint::load(const std::vector<NamedTensor>& tensors, OtherTensors others) const {
    std::map<std::string_view, const NamedTensor*> stored, wanted;
    for (const NamedTensor& tensor : manifest_.tensors) stored[tensor.name] = &tensor;
    for (const NamedTensor& tensor : tensors) {
        require(wanted.emplace(tensor.name, &tensor).second, "tensor %s is requested twice", tensor.name);
        if (!stored.contains(tensor.name)) fail(Exit::data, "%s has no tensor %s", directory_, tensor.name);
        check_wanted(tensor, *stored[tensor.name], others == OtherTensors::ignore, directory_);
    }
    for (const auto& [name, tensor] : stored)
        if (others == OtherTensors::refuse && !wanted.contains(name))
            fail(Exit::data, "%s has tensor %s, which this model does not have", directory_, tensor->name);
    for (size_t i = 0; i < files_.size(); i++) {
        VerifiedCopy source(files_[i], manifest_.shards[i]);
        for (const Piece& piece : manifest_.shards[i].pieces) {
            if (!wanted.contains(piece.tensor)) continue;
            const Dtype type = stored[piece.tensor]->values.dtype;
            source.copy(*wanted[piece.tensor], type, piece);
        }
    }
}

void write_manifest(const Manifest& manifest, const std::string& directory) {
    const std::string text = manifest_to_text(manifest);
    // Parse the text, so that a manifest that cannot be loaded is never committed.
    manifest_from_text(text, manifest_path(directory));
    write_file_atomically(manifest_path(directory), text);
    write_file_atomically(commit_path(directory), commit_line(text));
}

Manifest read_manifest(const std::string& directory) {
    std::string path = manifest_path(directory), said, text;
    auto read_both = [&] {
        said = read_file(commit_path(directory), kMaxCommitBytes);
        text = read_file(path);
        return said == commit_line(text);
    };
    if (!read_both()) {  // retry, bypassing the page cache
        for (const std::string& name : {commit_path(directory), path}) InputFile(name).forget_cached();
        if (read_both())
            std::fprintf(stderr,
                         "train_gpt: warning: %s or its COMMIT file failed its hash once and passed when read again: "
                         "check this machine's memory and disk\n",
                         printable_text(path).c_str());
    }
    if (std::string is = commit_line(text); said != is)
        fail(Exit::data, "%s does not match %s: its size and hash are %s, must be %s", path, commit_path(directory),
             printed(is), printed(said));
    Manifest manifest = manifest_from_text(text, path);
    auto step = step_of_name(std::filesystem::path(directory).filename());
    if (step && *step != manifest.info.step) fail(Exit::data, "%s contains step %d", directory, manifest.info.step);
    open_shards(directory, manifest);
    return manifest;
}

std::string checkpoints_directory(const std::string& run_dir) { return run_dir + "/checkpoints"; }

std::string step_directory(const std::string& run_dir, int64_t step) {
    return checkpoints_directory(run_dir) + "/" + step_name(step);
}

bool has_checkpoints(const std::string& run_dir) {
    const std::string path = checkpoints_directory(run_dir);
    if (directory_exists(path)) return true;
    std::error_code error;
    if (std::filesystem::symlink_status(path, error).type() == std::filesystem::file_type::not_found) return false;
    fail(Exit::io, "%s exists but is not a directory or a link to one; is the target of the link mounted?", path);
}

std::vector<int64_t> committed_steps(const std::string& run_dir) {
    std::vector<int64_t> steps;
    if (!has_checkpoints(run_dir)) return steps;
    for (const std::string& name : list_directory(checkpoints_directory(run_dir)))
        if (auto step = step_of_name(name)) steps.push_back(*step);
    std::sort(steps.begin(), steps.end());
    return steps;
}

std::string set_aside(const std::string& run_dir, int64_t step, const std::string& reason) {
    const std::string name = reason + "." + step_name(step) + ".";
    const std::string path = first_unused(checkpoints_directory(run_dir) + "/" + name);
    rename_path(step_directory(run_dir, step), path);
    sync_directory(directory_of(path));
    return path;
}

// Removes leftovers of killed saves and deletions. Reports those that cannot be removed.
static void remove_leftovers(const std::string& checkpoints, const Report& report) {
    for (const std::string& name : list_directory(checkpoints)) {
        if (!name.starts_with("tmp.") && !name.starts_with("deleting.")) continue;
        try {
            remove_tree(checkpoints + "/" + name);
        } catch (const Error& error) {
            report(error.what());
        }
    }
}

std::optional<Checkpoint> find_newest_valid(const std::string& run_dir, const Report& report) {
    if (!has_checkpoints(run_dir)) return {};
    remove_leftovers(checkpoints_directory(run_dir), report);
    std::optional<Error> unreadable;
    std::vector<int64_t> steps = committed_steps(run_dir);
    for (; !steps.empty(); steps.pop_back()) {
        const int64_t step = steps.back();
        std::string kind = "unhealthy", reason = "it contains non-finite values";
        try {
            Checkpoint checkpoint(step_directory(run_dir, step));
            if (checkpoint.manifest().is_finite()) return checkpoint;
        } catch (const NewerVersion&) {
            throw;
        } catch (const Error& error) {
            kind = "damaged", reason = error.what();
            if (error.code != Exit::data && error.code != Exit::no_input) {
                unreadable = unreadable ? unreadable : error;
                report(format("checkpoint of step %ld cannot be read and is left unchanged: %s", step, error.what()));
                continue;
            }
        }
        const std::string aside = set_aside(run_dir, step, kind);
        report(format("checkpoint of step %ld is set aside as %s: %s", step, aside.c_str(), reason.c_str()));
    }
    if (unreadable)
        fail(unreadable->code, "%s: no checkpoint can be read: %s", checkpoints_directory(run_dir), unreadable->what());
    return {};
}

Checkpoint open_step(const std::string& run_dir, int64_t step, const Report& report) {
    const std::string directory = step_directory(run_dir, step);
    const std::vector<int64_t> steps = committed_steps(run_dir);
    if (std::ranges::count(steps, step) == 0) {
        const std::string there = steps.empty() ? "" : "; available steps: " + joined(steps);
        fail(Exit::no_input, "%s: no checkpoint of step %ld%s", checkpoints_directory(run_dir), step, there);
    }
    Checkpoint checkpoint(directory);
    for (const int64_t later : steps) {
        if (later <= step) continue;
        const std::string aside = set_aside(run_dir, later, "superseded");
        report(format("checkpoint of step %ld is set aside as %s: the run continues from step %ld", later,
                      aside.c_str(), step));
    }
    return checkpoint;
}

Checkpoint open_checkpoint(const std::string& path) {
    if (file_exists(manifest_path(path))) return Checkpoint(path);
    if (!file_exists(path) && !directory_exists(path)) fail(Exit::no_input, "%s does not exist", path);
    std::string problems;
    const std::vector<int64_t> steps = committed_steps(path);
    for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
        try {
            return Checkpoint(step_directory(path, *step));
        } catch (const Error& error) {
            problems += std::string("\n  ") + error.what();
        }
    }
    fail(Exit::no_input, "%s: found no valid checkpoint (give a run directory or RUN/checkpoints/step_N)%s", path,
         problems);
}

std::string run_directory_of(const std::string& step_directory) {
    return std::filesystem::absolute(step_directory).lexically_normal().parent_path().parent_path().string();
}
