// Positions of a batch whose sequences are chunks of longer ones.
#pragma once

#include "kernels/numeric.h"  // IWYU pragma: export

namespace ops {

// With context parallelism, a rank has two chunks of each sequence. Its batch holds the first chunks of all sequences,
// then the second ones. Without, both start at position 0.
struct ChunkStarts {
    int first = 0, second = 0;  // positions of the chunks' first tokens

    // The position of the first token of sequence `b` of a batch.
    HOST_DEVICE int start(int b, int batch) const { return 2 * b < batch ? first : second; }
};

}  // namespace ops
