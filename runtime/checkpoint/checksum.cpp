#include "runtime/checkpoint/checksum.h"

#define XXH_STATIC_LINKING_ONLY  // for the state's size
#include <isa-l/crc.h>
#include <xxhash.h>

#include <algorithm>

#include "kernels/check.h"

namespace {

std::string hex_of(XXH128_hash_t hash) {
    return format("%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                  static_cast<unsigned long long>(hash.low64));
}

}  // namespace

uint32_t crc32c(const void* bytes, size_t count) {
    constexpr size_t kMostPerCall = size_t(1) << 30;  // the library counts in int
    auto* next = static_cast<const unsigned char*>(bytes);
    uint32_t crc = ~uint32_t(0);
    for (size_t left = count; left > 0;) {
        size_t part = std::min(left, kMostPerCall);
        crc = crc32_iscsi(const_cast<unsigned char*>(next), static_cast<int>(part), crc);  // reads only
        next += part, left -= part;
    }
    return ~crc;
}

std::string xxh3_128(std::string_view text) { return hex_of(XXH3_128bits(text.data(), text.size())); }

struct Xxh3Stream::State {
    XXH3_state_t xxh3;
};

Xxh3Stream::Xxh3Stream() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->xxh3); }
Xxh3Stream::Xxh3Stream(Xxh3Stream&&) noexcept = default;
Xxh3Stream& Xxh3Stream::operator=(Xxh3Stream&&) noexcept = default;
Xxh3Stream::~Xxh3Stream() = default;

void Xxh3Stream::update(const void* bytes, size_t count) { XXH3_128bits_update(&state_->xxh3, bytes, count); }
std::string Xxh3Stream::hex() const { return hex_of(XXH3_128bits_digest(&state_->xxh3)); }
