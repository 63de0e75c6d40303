#include "runtime/checkpoint/shard.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/check.h"
#include "runtime/checkpoint/checksum.h"

static_assert(std::endian::native == std::endian::little,
              "checkpoints hold little-endian numbers as they are in memory");

namespace {

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
    if (dtype == Dtype::fp32) return all_finite<uint32_t>(numbers, count, 0x7f800000u);
    return all_finite<uint16_t>(numbers, count, dtype == Dtype::bf16 ? 0x7f80u : 0x7c00u);
}

size_t total_bytes(const std::vector<SaveTensor>& tensors) {
    size_t bytes = 0;
    for (const SaveTensor& tensor : tensors) bytes += tensor.count * size_of(tensor.info.dtype);
    return bytes;
}

// Collects pieces in the staging buffer and writes, checks and hashes it each time it is full.
class StagedShard {
public:
    StagedShard(const std::string& path, size_t bytes, std::vector<std::byte>& staging)
        : file_(path, bytes), staging_(staging) {}

    void add(const SaveTensor& tensor) {
        if (tensor.count == 0) return;
        size_t element = size_of(tensor.info.dtype);
        require(offset() % element == 0, "checkpoint: tensor %s would begin at offset %zu, which is not aligned",
                tensor.info.name.c_str(), offset());
        shard_.pieces.push_back({tensor.info.name, offset(), tensor.first, tensor.count});
        for (size_t done = 0; done < tensor.count;) {
            if (used_ == staging_.size()) flush();
            size_t part = std::min(tensor.count - done, (staging_.size() - used_) / element);
            tensor.read(staging_.data() + used_, tensor.first + done, part);
            shard_.finite &= all_finite(staging_.data() + used_, part, tensor.info.dtype);
            used_ += part * element;
            done += part;
        }
    }

    ShardFile finish() {
        flush();
        file_.sync();
        file_.close();
        shard_.xxh3_128 = hash_.hex();
        return std::move(shard_);
    }

private:
    size_t offset() const { return shard_.bytes + used_; }

    // The buffer holds whole chunks except at the end of the file.
    void flush() {
        for (size_t begin = 0; begin < used_; begin += kChunkBytes)
            shard_.chunk_crc32c.push_back(crc32c(staging_.data() + begin, std::min(kChunkBytes, used_ - begin)));
        hash_.update(staging_.data(), used_);
        file_.append(staging_.data(), used_);
        shard_.bytes += used_;
        used_ = 0;
    }

    OutputFile file_;
    std::vector<std::byte>& staging_;
    size_t used_ = 0;
    Xxh3Stream hash_;
    ShardFile shard_;
};

}  // namespace

std::vector<SaveTensor> to_save(const std::vector<StateTensor>& tensors) {
    std::vector<SaveTensor> list;
    for (const StateTensor& tensor : tensors) {
        auto read = [tensor](void* to, size_t first, size_t count) {
            copy_to_host(to, tensor.values + (first - tensor.first), count * sizeof(float), Stream{});
            synchronize(Stream{});
        };
        list.push_back({{tensor.name, Dtype::fp32, tensor.shape}, tensor.first, tensor.count, read});
    }
    return list;
}

std::vector<LoadTensor> to_load(const std::vector<StateTensor>& tensors) {
    std::vector<LoadTensor> list;
    for (const StateTensor& tensor : tensors) {
        auto write = [tensor](const void* from, size_t first, size_t count) {
            copy_to_device(tensor.values + (first - tensor.first), from, count * sizeof(float), Stream{});
        };
        list.push_back({{tensor.name, Dtype::fp32, tensor.shape}, tensor.first, tensor.count, write});
    }
    return list;
}

ShardFile write_shard(const std::string& directory, int rank, const std::vector<SaveTensor>& tensors,
                      std::vector<std::byte>& staging) {
    require(!staging.empty() && staging.size() % kChunkBytes == 0, "checkpoint: a staging buffer of %zu bytes",
            staging.size());
    StagedShard shard(directory + "/" + shard_name(rank), total_bytes(tensors), staging);
    for (const SaveTensor& tensor : tensors) shard.add(tensor);
    ShardFile record = shard.finish();
    record.name = shard_name(rank);
    return record;
}

void verify_shard(const MappedFile& file, const ShardFile& expected) {
    if (file.size() != expected.bytes)
        fail(Exit::data, "%s has %zu bytes, must have %zu", file.path().c_str(), file.size(), expected.bytes);
    Xxh3Stream hash;
    for (size_t begin = 0, chunk = 0; begin < expected.bytes; begin += kChunkBytes, chunk++) {
        size_t bytes = std::min(kChunkBytes, expected.bytes - begin);
        uint32_t crc = crc32c(file.data() + begin, bytes);
        if (crc != expected.chunk_crc32c[chunk])
            fail(Exit::data, "%s is damaged in the %zu bytes from offset %zu: their CRC32C is %08x, must be %08x",
                 file.path().c_str(), bytes, begin, crc, expected.chunk_crc32c[chunk]);
        hash.update(file.data() + begin, bytes);
    }
    if (hash.hex() != expected.xxh3_128)
        fail(Exit::data, "%s is damaged: the XXH3 hash of its %zu bytes is %s, must be %s", file.path().c_str(),
             file.size(), hash.hex().c_str(), expected.xxh3_128.c_str());
}
