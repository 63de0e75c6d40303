// One rank's file of a checkpoint: written through a bounded buffer, verified block by block. Checksums find accidental
// damage, CRC32C of each block also its place, XXH3-128 of the whole file any; neither stops a deliberate forgery.
#pragma once

#include "runtime/checkpoint/manifest.h"
#include "runtime/io/io.h"

// CRC-32C (Castagnoli, reflected polynomial 0x82f63b78, RFC 3720 appendix B.4): crc32c("123456789") is 0xe3069283.
// `count` is below 2^31.
uint32_t crc32c(const void* bytes, size_t count);

// XXH3 with 128 bits of a text, as 32 lower-case hexadecimal digits, the way `xxhsum -H128` prints it.
std::string xxh3_128(std::string_view text);

// Creates directory/shard_name(rank), writes this rank's part of the tensors through a buffer of
// `staging_bytes` (a multiple of kBlockBytes) and syncs it. Exit::io or Exit::cannot_create; the file is then
// incomplete and of no use.
ShardFile write_shard(const std::string& directory, int rank, const std::vector<NamedTensor>& tensors,
                      size_t staging_bytes);

// Compares a mapped shard file, which has the recorded size, with its record: CRC32C of each block, hash of the whole.
// Exit::data names the file, the offset, the expected and the actual value.
void verify_shard(const MappedFile& file, const ShardFile& expected);
