#include <filesystem>

#include "kernels/check.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/train_state.h"

namespace {

bool is_step_directory(const std::string& path) { return file_exists(path + "/MANIFEST.json"); }

void inspect_checkpoint(const std::string& path, const std::function<void(const std::string&)>& print) {
    const Checkpoint checkpoint(path);
    const Manifest& manifest = checkpoint.manifest();
    size_t bytes = 0;
    for (const ShardFile& shard : manifest.shards) bytes += shard.bytes;
    print(format("%s: checkpoint of step %d, run %s, written by %d rank(s), %.1f MiB, %s", path.c_str(),
                 manifest.info.step, manifest.info.run_id.c_str(), manifest.world_size, double(bytes) / 0x1p20,
                 manifest.info.healthy ? "sound" : "sound, but with values that are not finite"));
    print("configuration " + manifest.info.config_digest + ", data " + manifest.info.dataset_digest + ", state " +
          nlohmann::ordered_json(manifest.info.progress).dump());
    for (const NamedTensor& tensor : manifest.tensors)
        print(format("  %-36s %s %s", tensor.name.c_str(), name_of(tensor.values.dtype),
                     shape_text(tensor.shape).c_str()));
}

void inspect_safetensors(const std::string& path, const std::function<void(const std::string&)>& print) {
    const Safetensors file(path);
    print(format("%s: safetensors, %zu tensors, sound", path.c_str(), file.entries().size()));
    for (const Safetensors::Entry& tensor : file.entries())
        print(format("  %-36s %s %s", tensor.name.c_str(), tensor.type.c_str(), shape_text(tensor.shape).c_str()));
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
    fail(Exit::no_input, "%s: no sound checkpoint here (it should be a run directory, or RUN/checkpoints/step_N)%s",
         path, problems);
}

std::string run_directory_of(const std::string& step_directory) {
    return std::filesystem::absolute(step_directory).lexically_normal().parent_path().parent_path().string();
}

bool inspect_runtime_path(const std::string& path, const std::function<void(const std::string&)>& print) {
    if (is_step_directory(path))
        inspect_checkpoint(path, print);
    else if (directory_exists(checkpoints_directory(path)))
        for (int64_t step : committed_steps(path)) inspect_checkpoint(step_directory(path, step), print);
    else if (path.ends_with(".safetensors") || path.ends_with(".safetensors.index.json"))
        inspect_safetensors(path, print);
    else
        return false;
    return true;
}
