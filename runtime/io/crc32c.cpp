#include "runtime/io/crc32c.h"

#include <isa-l/crc.h>

uint32_t crc32c(const void* bytes, size_t count, uint32_t before) {
    auto* data = const_cast<unsigned char*>(static_cast<const unsigned char*>(bytes));  // the library only reads it
    return ~crc32_iscsi(data, static_cast<int>(count), ~before);
}
