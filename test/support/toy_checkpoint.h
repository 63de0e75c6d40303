// A model of a few tensors whose values depend on a seed, and ways to damage its saved files.
#pragma once

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "kernels/numeric.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/shard.h"
#include "runtime/io/digest.h"

class ToyModel {
public:
    ToyModel(uint64_t seed, std::vector<std::vector<size_t>> shapes) : shapes_(shapes) {
        for (size_t t = 0; t < shapes.size(); t++) {
            values_.emplace_back(elements_of({"tensor", shapes[t]}));
            for (size_t i = 0; i < values_[t].size(); i++)
                values_[t][i] = uniform_from_bits(philox(seed, t, i).word[0]) - 0.5f;
        }
    }

    std::vector<std::vector<float>>& values() { return values_; }

    // The tensors of one of `ranks`: part `rank` of each tensor, in parts of unequal size.
    std::vector<NamedTensor> tensors(int rank = 0, int ranks = 1) {
        std::vector<NamedTensor> list;
        for (size_t t = 0; t < shapes_.size(); t++) {
            const size_t part = values_[t].size() / size_t(ranks), first = part * size_t(rank);
            const size_t count = rank == ranks - 1 ? values_[t].size() - first : part;
            list.push_back({"tensor/" + std::to_string(t), shapes_[t], values_[t].data() + first, first, count});
        }
        return list;
    }

    bool operator==(const ToyModel& other) const {  // bit for bit
        auto is_same = [](const std::vector<float>& a, const std::vector<float>& b) {
            return a.size() == b.size() && (a.empty() || std::memcmp(&a[0], &b[0], a.size() * sizeof(float)) == 0);
        };
        return shapes_ == other.shapes_ &&
               std::equal(values_.begin(), values_.end(), other.values_.begin(), other.values_.end(), is_same);
    }

private:
    std::vector<std::vector<size_t>> shapes_;
    std::vector<std::vector<float>> values_;
};

inline TrainState toy_info(int64_t step, const std::string& run_id = "run-a") {
    TrainState info;
    info.step = int(step);
    info.run_id = run_id;
    info.config = "{\n  \"model\": \"toy\"\n}\n";
    info.config_digest = "c0ffee";
    info.dataset_digest = "da7a";
    info.progress.cursor = uint64_t(step) * 8;
    info.progress.loss_scale.scale = 0.1f;
    return info;
}

inline SaveStats save_toy(const std::string& run_dir, int64_t step, ToyModel model,
                          const std::string& run_id = "run-a") {
    return save_checkpoint(run_dir, comm_single(), toy_info(step, run_id), model.tensors());
}

// Overwrites a file's content in place, without truncating it to zero first, after which ext4 waits for the disk.
inline void overwrite(const std::string& path, const std::string& content) {
    std::ofstream(path, std::ios::app).close();  // creates it
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file << content;
    file.close();
    require(file.good(), "cannot overwrite %s", path.c_str());
    std::filesystem::resize_file(path, content.size());
}

inline std::string with_flipped_bit(std::string content, size_t bit) {
    content[bit / 8] = char(content[bit / 8] ^ (1 << (bit % 8)));
    return content;
}

inline std::string replaced(std::string text, const std::string& from, const std::string& to) {
    size_t at = text.find(from);
    require(at != std::string::npos, "the manifest has no %s", from.c_str());
    return text.replace(at, from.size(), to);
}

// Commits a manifest with a matching COMMIT, so that only its content can be rejected.
inline void commit_text(const std::string& directory, const std::string& text) {
    overwrite(directory + "/MANIFEST.json", text);
    overwrite(directory + "/COMMIT", std::to_string(text.size()) + " " + xxh3_128(text) + "\n");
}

// A checkpoint as several ranks write it, each with one of `parts`, assembled by hand according to the format. Returns
// its directory.
inline std::string save_parts(const std::string& run_dir, int64_t step, const std::vector<NamedTensor>& tensors,
                              const std::vector<std::vector<NamedTensor>>& parts) {
    std::string directory = step_directory(run_dir, step);
    make_directories(directory);
    Manifest manifest{.info = toy_info(step), .world_size = int(parts.size()), .tensors = tensors, .shards = {}};
    for (size_t rank = 0; rank < parts.size(); rank++)
        manifest.shards.push_back(write_shard(directory, int(rank), parts[rank], copy_part_from_device));
    commit_text(directory, manifest_to_text(manifest));
    return directory;
}
