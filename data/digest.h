// XXH3's 128-bit hash of a sequence of parts, to detect changed data. Not cryptographic.
#pragma once

#include <xxhash.h>

#include <memory>
#include <string>
#include <string_view>

#include "kernels/check.h"

class Digest {
public:
    Digest() : state_(XXH3_createState(), &XXH3_freeState) {
        require(state_ != nullptr, "digest: no memory");
        XXH3_128bits_reset(state_.get());
    }
    void add(const void* bytes, size_t count) { XXH3_128bits_update(state_.get(), bytes, count); }
    void add(std::string_view bytes) { add(bytes.data(), bytes.size()); }
    void add_number(uint64_t number) { add(&number, sizeof(number)); }

    std::string hex() const {  // 32 digits
        XXH128_hash_t hash = XXH3_128bits_digest(state_.get());
        return format("%016llx%016llx", (unsigned long long)hash.high64, (unsigned long long)hash.low64);
    }

private:
    std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state_;
};
