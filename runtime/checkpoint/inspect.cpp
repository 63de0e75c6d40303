#include <filesystem>
#include <regex>

#include "kernels/base/check.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/train_state.h"
#include "runtime/io/files.h"

namespace {

bool is_step_directory(const std::string& path) { return file_exists(path + "/MANIFEST.json"); }

using Print = std::function<void(const std::string&)>;

struct Listed {
    std::string name, type;
    std::vector<size_t> shape;
};

size_t elements(const Listed& tensor) {
    size_t count = 1;
    for (const size_t size : tensor.shape) count *= size;
    return count;
}

// Prints one line per tensor or, unless `all`, one per tensor of all layers ("h.*.ln_1.weight") and per moment ("m.*").
void print_tensors(const std::vector<Listed>& tensors, bool all, const Print& print) {
    struct Row {
        std::string name, what;
        bool is_moment;
        size_t count = 0, elements = 0;
    };
    static const std::regex kLayer("\\.[0-9]+\\."), kMoment("[mv]\\..*");
    std::vector<Row> rows;
    for (const Listed& tensor : tensors) {
        const bool is_moment = !all && std::regex_match(tensor.name, kMoment);
        Row fresh{tensor.name, tensor.type + " " + shape_text(tensor.shape), is_moment};
        if (is_moment)
            fresh.name.resize(2), fresh.name += '*', fresh.what = tensor.type;
        else if (!all)
            fresh.name = std::regex_replace(tensor.name, kLayer, ".*.");
        auto is_same = [&](const Row& row) { return row.name == fresh.name && row.what == fresh.what; };
        auto row = std::ranges::find_if(rows, is_same);
        if (row == rows.end()) row = rows.insert(rows.end(), fresh);
        row->count++;
        row->elements += elements(tensor);
    }
    for (const Row& row : rows) {
        const std::string line = format("  %-36s %s", row.name.c_str(), row.what.c_str());
        const std::string together = format(", %zu tensors, %zu elements", row.count, row.elements);
        print(line + (row.is_moment ? together : row.count > 1 ? format(" x %zu", row.count) : ""));
    }
}

void inspect_checkpoint(const std::string& path, bool all, const Print& print) {
    const Checkpoint checkpoint(path);
    const Manifest& manifest = checkpoint.manifest();
    size_t bytes = 0;
    for (const ShardFile& shard : manifest.shards) bytes += shard.bytes;
    const char* const state = manifest.info.healthy ? "valid" : "valid, but with non-finite values";
    print(format("%s: checkpoint of step %d, run %s, written by %d rank(s), %zu tensors, %.1f MiB, %s", path.c_str(),
                 manifest.info.step, manifest.info.run_id.c_str(), manifest.world_size, manifest.tensors.size(),
                 double(bytes) / 0x1p20, state));
    print("configuration " + manifest.info.config_digest + ", data " + manifest.info.dataset_digest + ", state " +
          nlohmann::ordered_json(manifest.info.progress).dump());
    std::vector<Listed> tensors;
    for (const NamedTensor& tensor : manifest.tensors)
        tensors.push_back({tensor.name, name_of(tensor.values.dtype), tensor.shape});
    print_tensors(tensors, all, print);
}

void inspect_safetensors(const std::string& path, bool all, const Print& print) {
    const Safetensors file(path);
    std::vector<Listed> tensors;
    size_t count = 0;
    for (const Safetensors::Entry& tensor : file.entries()) {
        tensors.push_back({tensor.name, tensor.type, tensor.shape});
        count += elements(tensors.back());
    }
    print(format("%s: safetensors, %zu tensors, %zu elements, valid", path.c_str(), tensors.size(), count));
    print_tensors(tensors, all, print);
}

}  // namespace

Checkpoint open_checkpoint(const std::string& path) {
    if (is_step_directory(path)) return Checkpoint(path);
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

bool inspect_runtime_path(const std::string& path, bool all, const Print& print) {
    if (is_step_directory(path))
        inspect_checkpoint(path, all, print);
    else if (directory_exists(checkpoints_directory(path)))
        for (int64_t step : committed_steps(path)) inspect_checkpoint(step_directory(path, step), all, print);
    else if (path.ends_with(".safetensors") || path.ends_with(".safetensors.index.json"))
        inspect_safetensors(path, all, print);
    else
        return false;
    return true;
}
