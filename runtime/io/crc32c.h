#pragma once

#include <isa-l/crc.h>

#include <cstddef>
#include <cstdint>

// CRC-32C (Castagnoli, reflected polynomial 0x82f63b78, RFC 3720 appendix B.4): crc32c("123456789") is 0xe3069283.
// `count` must be below 2^31. `before`: the CRC of the preceding bytes, to continue it.
inline uint32_t crc32c(const void* bytes, size_t count, uint32_t before = 0) {
    auto* data = const_cast<unsigned char*>(static_cast<const unsigned char*>(bytes));  // the library only reads it
    return ~crc32_iscsi(data, static_cast<int>(count), ~before);
}
