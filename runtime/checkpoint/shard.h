// One rank's file of a checkpoint: written through a bounded buffer, verified chunk by chunk.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "kernels/tensor.h"
#include "runtime/checkpoint/manifest.h"
#include "runtime/io/io.h"

// What this rank stores of a tensor. Ranks' ranges together must hold every element exactly once; of a tensor that all
// ranks hold, one rank stores everything and the others have count 0.
struct SaveTensor {
    TensorInfo info;
    size_t first = 0, count = 0;  // elements of the flattened tensor
    // Copies elements [first, first + count), counted from the start of the whole tensor, to host memory. Called with
    // ascending, adjoining ranges of at most the staging buffer's size; it has finished (synchronised) when it returns.
    std::function<void(void* to, size_t first, size_t count)> read;
};

// What this rank wants of a tensor. count 0: nothing, but the tensor is known.
struct LoadTensor {
    TensorInfo info;
    size_t first = 0, count = 0;  // elements of the flattened tensor
    // Takes elements [first, first + count), counted from the start of the whole tensor, from host memory that is
    // aligned to the element type and valid during the call. Called with ascending, adjoining ranges.
    std::function<void(const void* from, size_t first, size_t count)> write;
};

// What a rank has of tensors on the device, as either.
std::vector<SaveTensor> to_save(const std::vector<StateTensor>& tensors);
std::vector<LoadTensor> to_load(const std::vector<StateTensor>& tensors);

// Creates directory/shard_name(rank), writes what `tensors` give through `staging` (a multiple of kChunkBytes) and
// syncs it. Tensors with larger elements come first, so that each piece is aligned. Exit::io or Exit::cannot_create;
// the file is then incomplete and of no use.
ShardFile write_shard(const std::string& directory, int rank, const std::vector<SaveTensor>& tensors,
                      std::vector<std::byte>& staging);

// Compares a mapped shard with its record: size, CRC32C of each chunk, hash of the whole. Exit::data names the file,
// the offset, the expected and the actual value.
void verify_shard(const MappedFile& file, const ShardFile& expected);
