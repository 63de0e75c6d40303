#include "runtime/checkpoint/shard.h"

#define XXH_STATIC_LINKING_ONLY  // for the state's size
#include <isa-l/crc.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/check.h"
#include "kernels/device.h"

static_assert(std::endian::native == std::endian::little,
              "checkpoints hold little-endian numbers as they are in memory");

namespace {

std::string hex_of(XXH128_hash_t hash) {
    return format("%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                  static_cast<unsigned long long>(hash.low64));
}

// Checksums of a file that arrives in parts, each of whole blocks but the last.
class FileChecksums {
public:
    FileChecksums() { XXH3_128bits_reset(&hash_); }

    // The CRC32C of one block as hexadecimal digits.
    std::string add(const std::byte* block, size_t bytes) {
        XXH3_128bits_update(&hash_, block, bytes);
        return format("%08x", crc32c(block, bytes));
    }
    std::string xxh3_128() const { return hex_of(XXH3_128bits_digest(&hash_)); }

private:
    XXH3_state_t hash_;
};

// A number is infinite or NaN exactly when its exponent bits are all ones.
template <class Word> bool all_finite(const std::byte* numbers, size_t count, Word exponent) {
    bool found = false;
    for (size_t i = 0; i < count; i++) {
        Word word;
        std::memcpy(&word, numbers + i * sizeof(Word), sizeof(Word));
        found |= (word & exponent) == exponent;
    }
    return !found;
}

bool all_finite(const std::byte* numbers, size_t count, Dtype dtype) {
    switch (dtype) {
        case Dtype::fp32: return all_finite<uint32_t>(numbers, count, 0x7f800000u);
        case Dtype::bf16: return all_finite<uint16_t>(numbers, count, 0x7f80u);
        case Dtype::fp16: return all_finite<uint16_t>(numbers, count, 0x7c00u);
        case Dtype::fp64: return all_finite<uint64_t>(numbers, count, 0x7ff0000000000000u);
    }
    return false;
}

}  // namespace

uint32_t crc32c(const void* bytes, size_t count) {
    auto* data = const_cast<unsigned char*>(static_cast<const unsigned char*>(bytes));  // the library only reads it
    return ~crc32_iscsi(data, static_cast<int>(count), ~uint32_t(0));
}

std::string xxh3_128(std::string_view text) { return hex_of(XXH3_128bits(text.data(), text.size())); }

ShardFile write_shard(const std::string& directory, int rank, const std::vector<NamedTensor>& tensors,
                      size_t staging_bytes) {
    require(staging_bytes > 0 && staging_bytes % kBlockBytes == 0, "checkpoint: a staging buffer of %zu bytes",
            staging_bytes);
    std::vector<std::byte> staging(staging_bytes);
    ShardFile shard{.name = shard_name(rank)};
    for (const NamedTensor& tensor : tensors) shard.bytes += tensor.count * size_of(tensor.values.dtype);
    OutputFile file(directory + "/" + shard.name, shard.bytes);
    FileChecksums checksums;
    size_t used = 0;  // bytes of the staging buffer, which holds whole blocks except at the end of the file
    auto flush = [&] {
        for (size_t begin = 0; begin < used; begin += kBlockBytes)
            shard.block_crc32cs += checksums.add(staging.data() + begin, std::min(kBlockBytes, used - begin));
        file.append(staging.data(), used);
        used = 0;
    };
    for (const NamedTensor& tensor : tensors) {
        if (tensor.count == 0) continue;
        const size_t element = size_of(tensor.values.dtype), offset = file.size() + used;
        require(bool(tensor.values), "checkpoint: tensor %s has no values", tensor.name);
        require(offset % element == 0, "checkpoint: tensor %s would begin at offset %zu, which is not aligned",
                tensor.name, offset);
        shard.pieces.push_back({tensor.name, offset, tensor.first, tensor.count});
        for (size_t done = 0, part; done < tensor.count; done += part) {
            if (used == staging.size()) flush();
            std::byte* to = staging.data() + used;
            part = std::min(tensor.count - done, (staging.size() - used) / element);
            copy_to_host(to, tensor.values.from(done).data, part * element, Stream{});
            synchronize(Stream{});
            shard.finite &= all_finite(to, part, tensor.values.dtype);
            used += part * element;
        }
    }
    flush();
    file.sync();
    file.close();
    shard.xxh3_128 = checksums.xxh3_128();
    return shard;
}

void verify_shard(const MappedFile& file, const ShardFile& expected) {
    FileChecksums checksums;
    for (size_t begin = 0, digit = 0; begin < expected.bytes; begin += kBlockBytes, digit += 8) {
        const size_t bytes = std::min(kBlockBytes, expected.bytes - begin);
        const std::string crc = checksums.add(file.data() + begin, bytes);
        const std::string must_be = expected.block_crc32cs.substr(digit, 8);
        if (crc != must_be)
            fail(Exit::data, "%s is damaged in the %zu bytes from offset %zu: their CRC32C is %s, must be %s",
                 file.path(), bytes, begin, crc, must_be);
    }
    if (const std::string hash = checksums.xxh3_128(); hash != expected.xxh3_128)
        fail(Exit::data, "%s is damaged: the XXH3 hash of its %zu bytes is %s, must be %s", file.path(), file.size(),
             hash, expected.xxh3_128);
}
