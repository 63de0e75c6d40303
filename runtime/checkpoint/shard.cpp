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

// Collects pieces in the staging buffer and checks, hashes and writes it each time it is full.
class StagedShard {
public:
    StagedShard(const std::string& path, size_t bytes, std::vector<std::byte>& staging)
        : file_(path, bytes), staging_(staging) {}

    void add(const NamedTensor& tensor) {
        if (tensor.count == 0) return;
        const size_t element = size_of(tensor.values.dtype), offset = file_.size() + used_;
        require(bool(tensor.values), "checkpoint: tensor %s has no values", tensor.name);
        require(offset % element == 0, "checkpoint: tensor %s would begin at offset %zu, which is not aligned",
                tensor.name, offset);
        shard_.pieces.push_back({tensor.name, offset, tensor.first, tensor.count});
        for (size_t done = 0; done < tensor.count;) {
            if (used_ == staging_.size()) flush();
            std::byte* to = staging_.data() + used_;
            const size_t part = std::min(tensor.count - done, (staging_.size() - used_) / element);
            copy_to_host(to, tensor.values.from(done).data, part * element, Stream{});
            synchronize(Stream{});
            shard_.finite &= all_finite(to, part, tensor.values.dtype);
            used_ += part * element;
            done += part;
        }
    }

    ShardFile finish() {
        flush();
        file_.sync();
        file_.close();
        shard_.bytes = file_.size();
        shard_.xxh3_128 = checksums_.xxh3_128();
        return std::move(shard_);
    }

private:
    // The buffer holds whole blocks except at the end of the file.
    void flush() {
        for (size_t begin = 0; begin < used_; begin += kBlockBytes)
            shard_.block_crc32cs += checksums_.add(staging_.data() + begin, std::min(kBlockBytes, used_ - begin));
        file_.append(staging_.data(), used_);
        used_ = 0;
    }

    OutputFile file_;
    std::vector<std::byte>& staging_;
    size_t used_ = 0;
    FileChecksums checksums_;
    ShardFile shard_;
};

}  // namespace

uint32_t crc32c(const void* bytes, size_t count) {
    auto* data = const_cast<unsigned char*>(static_cast<const unsigned char*>(bytes));  // the library only reads it
    return ~crc32_iscsi(data, static_cast<int>(count), ~uint32_t(0));
}

std::string xxh3_128(std::string_view text) { return hex_of(XXH3_128bits(text.data(), text.size())); }

ShardFile write_shard(const std::string& directory, int rank, const std::vector<NamedTensor>& tensors,
                      std::vector<std::byte>& staging) {
    require(!staging.empty() && staging.size() % kBlockBytes == 0, "checkpoint: a staging buffer of %zu bytes",
            staging.size());
    size_t bytes = 0;
    for (const NamedTensor& tensor : tensors) bytes += tensor.count * size_of(tensor.values.dtype);
    StagedShard shard(directory + "/" + shard_name(rank), bytes, staging);
    for (const NamedTensor& tensor : tensors) shard.add(tensor);
    ShardFile record = shard.finish();
    record.name = shard_name(rank);
    return record;
}

void verify_shard(const MappedFile& file, const ShardFile& expected) {
    if (file.size() != expected.bytes)
        fail(Exit::data, "%s has %zu bytes, must have %zu", file.path(), file.size(), expected.bytes);
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
