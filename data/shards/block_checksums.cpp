#include "data/shards/block_checksums.h"

#include <algorithm>
#include <charconv>

#include "kernels/base/check.h"
#include "runtime/io/crc32c.h"

void BlockChecksums::add(std::string_view bytes) {
    while (!bytes.empty()) {
        const size_t filled = size_t(bytes_ % kBlockBytes), count = std::min(bytes.size(), kBlockBytes - filled);
        if (filled == 0) blocks_.push_back(0);
        blocks_.back() = crc32c(bytes.data(), count, blocks_.back());
        bytes_ += count;
        bytes.remove_prefix(count);
    }
}

std::string BlockChecksums::hex() const {
    std::string text;
    for (const uint32_t checksum : blocks_) text += format("%08x", checksum);
    return text;
}

std::optional<BlockChecksums> BlockChecksums::parse(std::string_view hex, uint64_t bytes) {
    const uint64_t blocks = (bytes + kBlockBytes - 1) / kBlockBytes;
    const bool has_digits = hex.find_first_not_of("0123456789abcdef") == std::string_view::npos;
    if (!has_digits || hex.size() != 8 * blocks) return std::nullopt;
    BlockChecksums checksums;
    checksums.bytes_ = bytes;
    for (size_t i = 0; i < hex.size(); i += 8)
        std::from_chars(hex.data() + i, hex.data() + i + 8, checksums.blocks_.emplace_back(), 16);
    return checksums;
}
