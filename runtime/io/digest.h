// 128-bit XXH3 hash of a sequence of parts, to detect changed data. Not cryptographic.
#pragma once

#define XXH_STATIC_LINKING_ONLY  // makes XXH3_state_t a complete type
#include <xxhash.h>

#include <cstdint>
#include <string_view>

#include "kernels/base/check.h"

class Digest {
public:
    Digest() { XXH3_128bits_reset(&state_); }
    void add(const void* bytes, size_t count) { XXH3_128bits_update(&state_, bytes, count); }
    void add(std::string_view bytes) { add(bytes.data(), bytes.size()); }
    void add_number(uint64_t number) { add(&number, sizeof(number)); }

    std::string hex() const {  // 32 digits
        XXH128_hash_t hash = XXH3_128bits_digest(&state_);
        return format("%016llx%016llx", (unsigned long long)hash.high64, (unsigned long long)hash.low64);
    }

private:
    XXH3_state_t state_;
};

// The 128-bit XXH3 hash of a text as 32 lower-case hexadecimal digits, as printed by `xxhsum -H128`.
inline std::string xxh3_128(std::string_view text) {
    Digest digest;
    digest.add(text);
    return digest.hex();
}
