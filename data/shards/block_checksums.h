// CRC32C of each 64 KiB of a shard's tokens. prepare records them in dataset.json; training compares each block when it
// first reads from it.
//
// The size bounds what a random window costs: the first window of a block reads 64 KiB where it needs 2 KiB at 1024
// tokens, and every block is read once more than without checksums. A shard of 10^8 tokens of 2 bytes has 3052 blocks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

class BlockChecksums {
public:
    static constexpr size_t kBlockBytes = size_t(64) << 10;

    // Of the bytes added so far, in order; the last block may be partial.
    void add(std::string_view bytes);

    uint64_t bytes() const { return bytes_; }
    size_t blocks() const { return blocks_.size(); }
    uint32_t operator[](size_t block) const { return blocks_[block]; }

    // 8 lower-case hexadecimal digits per block.
    std::string hex() const;

    // What hex() returned after `bytes` bytes; nullopt if it is not that. More can be added.
    static std::optional<BlockChecksums> parse(std::string_view hex, uint64_t bytes);

private:
    uint64_t bytes_ = 0;
    std::vector<uint32_t> blocks_;
};
