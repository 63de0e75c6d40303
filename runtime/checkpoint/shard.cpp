#include "runtime/checkpoint/shard.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/device.h"
#include "runtime/io/crc32c.h"
#include "runtime/io/digest.h"

static_assert(std::endian::native == std::endian::little,
              "checkpoints store numbers in the memory's byte order, which must be little-endian");

namespace {

// A number is infinite or NaN if and only if its exponent bits are all ones.
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
        default: fail(Exit::internal, "a checkpoint with %s", name_of(dtype));
    }
}

}  // namespace

// Verifies the file as stored on the disk. A mismatch is an error of the disk, Exit::io.
static void read_back(const std::string& directory, const ShardFile& shard) {
    try {
        const InputFile file(directory + "/" + shard.name);
        file.forget_cached();
        if (file.size() != shard.bytes)
            fail(Exit::data, "%s has %zu bytes, but %zu were written", file.path(), file.size(), shard.bytes);
        verify_shard(file, shard);
    } catch (const Error& error) {
        if (error.code != Exit::data) throw;
        fail(Exit::io, "the data read back differs from the data written: %s", error.what());
    }
}

void copy_part_from_device(std::byte* to, const NamedTensor& tensor, size_t first, size_t count) {
    require(bool(tensor.values), "checkpoint: tensor %s has no values", tensor.name);
    copy_to_host(to, tensor.values.from(first).data, count * size_of(tensor.values.dtype), Stream{});
    synchronize(Stream{});
}

ShardFile write_shard(const std::string& directory, int rank, const std::vector<NamedTensor>& tensors,
                      const CopyPart& copy_part) {
    std::vector<std::byte> block(kBlockBytes);
    ShardFile shard{.name = shard_name(rank)};
    for (const NamedTensor& tensor : tensors) shard.bytes += tensor.count * size_of(tensor.values.dtype);
    OutputFile file(directory + "/" + shard.name, shard.bytes);
    Digest hash;
    size_t used = 0;  // bytes of the block, which is whole except at the end of the file
    auto flush = [&] {
        if (used == 0) return;
        shard.block_crc32cs += format("%08x", crc32c(block.data(), used));
        hash.add(block.data(), used);
        file.append(block.data(), used);
        used = 0;
    };
    for (const NamedTensor& tensor : tensors) {
        const size_t element = size_of(tensor.values.dtype);
        size_t offset = file.size() + used;
        require(tensor.count == 0 || offset % element == 0, "checkpoint: tensor %s at offset %zu would not be aligned",
                tensor.name, offset);
        for (Piece& piece : pieces_of(tensor)) {
            piece.file_offset = offset;
            offset += piece.count * element;
            shard.pieces.push_back(std::move(piece));
        }
        for (size_t done = 0, part; done < tensor.count; done += part) {
            if (used == block.size()) flush();
            std::byte* to = block.data() + used;
            part = std::min(tensor.count - done, (block.size() - used) / element);
            copy_part(to, tensor, done, part);
            shard.finite &= all_finite(to, part, tensor.values.dtype);
            used += part * element;
        }
    }
    flush();
    file.sync();
    file.close();
    shard.xxh3_128 = hash.hex();
    read_back(directory, shard);
    return shard;
}

size_t read_verified_block(const InputFile& file, const ShardFile& expected, size_t block, std::byte* to) {
    const size_t begin = block * kBlockBytes, bytes = std::min(kBlockBytes, expected.bytes - begin);
    const auto must_be =
        uint32_t(std::stoul(expected.block_crc32cs.substr(block * kCrcDigits, kCrcDigits), nullptr, 16));
    const uint32_t crc = file.read_checked(begin, to, bytes, must_be);
    if (crc != must_be)
        fail(Exit::data, "%s is damaged: the CRC32C of the %zu bytes at offset %zu is %08x, must be %08x", file.path(),
             bytes, begin, crc, must_be);
    return bytes;
}

void verify_shard(const InputFile& file, const ShardFile& expected) {
    std::vector<std::byte> buffer(std::min(kBlockBytes, expected.bytes));
    Digest hash;
    for (size_t block = 0; block * kBlockBytes < expected.bytes; block++)
        hash.add(buffer.data(), read_verified_block(file, expected, block, buffer.data()));
    if (hash.hex() != expected.xxh3_128)
        fail(Exit::data, "%s is damaged: the XXH3 hash of its %zu bytes is %s, must be %s", file.path(), file.size(),
             hash.hex(), expected.xxh3_128);
}
