// What a checkpoint says about itself: MANIFEST.json, as a struct and as text.
//
// Tensors are stored by name and by the global offset of their elements, so that any number of ranks can read what any
// number of ranks wrote: a shard file is the concatenation of its pieces, and the pieces of all shards together hold
// every element of every tensor exactly once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/numeric.h"

inline constexpr int kCheckpointVersion = 1;
inline constexpr size_t kChunkBytes = size_t(1) << 20;  // that one CRC32C covers; the last chunk of a file is shorter

// What a tensor is, on every rank the same.
struct TensorInfo {
    std::string name;  // unique in the checkpoint: "h.0.attn.qkv.weight", "adam_m/h.0.attn.qkv.weight"
    Dtype dtype = Dtype::fp32;
    std::vector<size_t> shape;  // outermost first; empty for a single number

    bool operator==(const TensorInfo&) const = default;
};

// Elements of a shape and bytes of a tensor. Exit::data, naming the tensor, when they do not fit into 63 bits.
size_t elements_of(const TensorInfo& tensor);
size_t bytes_of(const TensorInfo& tensor);

// Elements [first, first + count) of the flattened tensor, stored at file_offset of the shard that lists this piece.
struct Piece {
    std::string tensor;
    size_t file_offset = 0;  // bytes
    size_t first = 0;        // elements
    size_t count = 0;        // elements
};

// The file one rank wrote.
struct ShardFile {
    std::string name;  // shard_name(rank)
    size_t bytes = 0;
    std::string xxh3_128;                // of the whole file
    std::vector<uint32_t> chunk_crc32c;  // of each kChunkBytes
    std::vector<Piece> pieces;           // by ascending file_offset, without gaps
    bool finite = true;                  // no NaN and no infinity among the values
};

// What the caller says about the moment that is saved.
struct CheckpointInfo {
    int64_t step = 0;          // optimizer steps done
    int64_t parent_step = -1;  // the checkpoint this process was resumed from or saved before; -1 for none
    std::string run_id;
    std::string config;         // the effective configuration, as printed
    std::string config_digest;  // of what must not change across a resume; the caller compares it
    std::string dataset_digest;
    bool healthy = true;  // false keeps it from displacing healthy ones; save() clears it when a value is not finite
    // Whatever else resuming needs: data cursor, loss scaler, counters. Numbers must be finite: JSON has no NaN.
    nlohmann::ordered_json state = nlohmann::ordered_json::object();
};

struct Manifest {
    CheckpointInfo info;
    int world_size = 1;
    std::vector<TensorInfo> tensors;
    std::vector<ShardFile> shards;  // shards[r] was written by rank r
};

std::string shard_name(int rank);  // "shard_0003.bin"

// One shard's record as text and back; ranks hand theirs to rank 0 in this form.
std::string shard_to_text(const ShardFile& shard);
ShardFile shard_from_text(std::string_view text, const std::string& path);

// The manifest as text and back. Reading checks everything that can be known without the shards: known version, every
// key there with the right type and no other, plain shard names, pieces that fill each file and each tensor exactly.
// Exit::data with a sentence that names `path` and the key.
std::string manifest_to_text(const Manifest& manifest);
Manifest manifest_from_text(std::string_view text, const std::string& path);

// True when `text` is a manifest that only a newer program can read: a reason to stop, not a sign of damage.
bool is_newer_manifest(std::string_view text, const std::string& path);
