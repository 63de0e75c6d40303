// Chunks of several tensors, for tests of updates.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <vector>

#include "kernels/ops.h"

// Sizes of tensors: one element, odd, a whole chunk, slightly more than a chunk, and three chunks. The whole chunk and
// the one after it begin at addresses of whole packs, others do not.
inline constexpr size_t kTensorSizes[] = {
    1, 39, ops::kChunkElements, ops::kChunkElements + 7, 1000, 2 * ops::kChunkElements + 130};
inline constexpr int kTensors = int(std::size(kTensorSizes));
inline constexpr int kGroups = 2;

// The state of a tensor starts this much later than its other arrays, and not always at a whole pack.
inline size_t state_shift(int tensor) { return size_t(64 * tensor + (tensor == 2)); }

inline std::vector<ops::Chunk> chunks_of_all_tensors() {
    std::vector<ops::Chunk> chunks;
    size_t begin = 0;
    for (int tensor = 0; tensor < kTensors; tensor++)
        for (size_t left = kTensorSizes[tensor]; left > 0; left -= chunks.back().count, begin += chunks.back().count)
            chunks.push_back({.begin = begin,
                              .count = int(std::min<size_t>(left, ops::kChunkElements)),
                              .tensor = tensor,
                              .index = int(chunks.size()),
                              .group = tensor % kGroups,
                              .state_begin = begin + state_shift(tensor),
                              .layer = tensor,
                              .first = uint32_t(kTensorSizes[tensor] - left)});
    return chunks;
}

inline size_t element_count() {
    size_t count = 0;
    for (size_t size : kTensorSizes) count += size;
    return count;
}

// Index of each tensor's first element.
inline size_t begin_of(int tensor) {
    size_t begin = 0;
    for (int t = 0; t < tensor; t++) begin += kTensorSizes[t];
    return begin;
}

// A rank owns only some chunks: every third is left out, and its elements must not change.
inline std::vector<ops::Chunk> chunks_of_one_rank() {
    std::vector<ops::Chunk> some;
    for (const ops::Chunk& chunk : chunks_of_all_tensors())
        if (some.size() % 3 != 1 || chunk.tensor % 2 == 0) some.push_back(chunk);
    return some;
}

// An offset into the flat arrays that needs more than 32 bits. Only the part of such long arrays that the chunks cover
// exists: an op gets that part's addresses minus this many elements.
inline constexpr size_t kFar = size_t(3) << 31;

inline std::vector<ops::Chunk> far(std::vector<ops::Chunk> chunks) {
    for (ops::Chunk& chunk : chunks) chunk.begin += kFar, chunk.state_begin += kFar;
    return chunks;
}
