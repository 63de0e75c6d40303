// A checkpoint shard: written through a bounded buffer, verified by block. The CRC32C of each block locates damage;
// the XXH3-128 of the whole file makes undetected damage very unlikely. Neither protects against deliberate forgery.
#pragma once

#include "runtime/checkpoint/manifest.h"
#include "runtime/io/files.h"

// Copies elements [first, first + count) of this rank's part of a tensor to host memory.
using CopyPart = std::function<void(std::byte* to, const NamedTensor& tensor, size_t first, size_t count)>;

// Copies from the tensor's values on the device and waits for the copy.
void copy_part_from_device(std::byte* to, const NamedTensor& tensor, size_t first, size_t count);

// Creates directory/shard_name(rank), writes this rank's part of the tensors through a buffer of kBlockBytes, syncs the
// file, and verifies it by reading it back from the disk. Fails with Exit::io or Exit::cannot_create; the file is then
// incomplete and must not be used.
ShardFile write_shard(const std::string& directory, int rank, const std::vector<NamedTensor>& tensors,
                      const CopyPart& copy_part);

// Verifies a shard file against its record: the CRC32C of each block and the hash of the file. Requires that the size
// matches. Fails with Exit::data, naming the file, the offset, the expected and the actual value; with Exit::io if the
// file cannot be read.
void verify_shard(const InputFile& file, const ShardFile& expected);

// Reads block `block` of the file, at most kBlockBytes, verifies its CRC32C, and returns its size. For reading data
// after verify_shard(). Fails as above.
size_t read_verified_block(const InputFile& file, const ShardFile& expected, size_t block, std::byte* to);
