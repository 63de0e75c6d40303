// CRC32C checksums of the 64 KiB blocks of a shard's tokens. prepare records them in dataset.json. Training verifies
// each block on its first read.
//
// The block size bounds the cost of a random window: the first window in a block reads 64 KiB instead of the 2 KiB that
// 1024 tokens need. Verification reads each block one extra time. A shard of 10^8 2-byte tokens has 3052 blocks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

class BlockChecksums {
public:
    static constexpr size_t kBlockBytes = size_t(64) << 10;

    // Appends bytes. The last block may be partial.
    void add(std::string_view bytes);

    uint64_t bytes() const { return bytes_; }
    size_t blocks() const { return blocks_.size(); }
    uint32_t operator[](size_t block) const { return blocks_[block]; }

    // Returns the checksums as 8 lower-case hexadecimal digits per block.
    std::string hex() const;

    // Parses the result of hex() for `bytes` bytes. Returns nullopt if `hex` is invalid. add() can then continue.
    static std::optional<BlockChecksums> parse(std::string_view hex, uint64_t bytes);

private:
    uint64_t bytes_ = 0;
    std::vector<uint32_t> blocks_;
};
