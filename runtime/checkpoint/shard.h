// One rank's file of a checkpoint: written through a bounded buffer, verified block by block. Checksums find accidental
// damage, CRC32C of each block also its place, XXH3-128 of the whole file any; neither stops a deliberate forgery.
#pragma once

#include "runtime/checkpoint/manifest.h"
#include "runtime/io/io.h"

// XXH3 with 128 bits of a text, as 32 lower-case hexadecimal digits, the way `xxhsum -H128` prints it.
std::string xxh3_128(std::string_view text);

// Copies elements [first, first + count) of this rank's part of a tensor to host memory.
using CopyPart = std::function<void(std::byte* to, const NamedTensor& tensor, size_t first, size_t count)>;

// From where the tensor's values are, on the device; waits for the copy.
void copy_part_from_device(std::byte* to, const NamedTensor& tensor, size_t first, size_t count);

// Creates directory/shard_name(rank), writes this rank's part of the tensors through a buffer of `staging_bytes` (a
// multiple of kBlockBytes), syncs the file, and reads it back from the disk to compare. Exit::io or
// Exit::cannot_create; the file is then incomplete and of no use.
ShardFile write_shard(const std::string& directory, int rank, const std::vector<NamedTensor>& tensors,
                      size_t staging_bytes, const CopyPart& copy_part = copy_part_from_device);

// Compares a shard file, which has the recorded size, with its record: CRC32C of each block, hash of the whole.
// Exit::data names the file, the offset, the expected and the actual value; Exit::io if it cannot be read.
void verify_shard(const InputFile& file, const ShardFile& expected);

// Reads block `block` of the file again, at most kBlockBytes, and compares it with its CRC32C: for bytes that are used
// after verify_shard(). Returns its size. Errors as above.
size_t read_verified_block(const InputFile& file, const ShardFile& expected, size_t block, std::byte* to);
