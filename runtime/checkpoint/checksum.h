// Checksums of what is stored: CRC32C for each chunk (finds and places damage), XXH3-128 for a whole file (finds any).
// Neither is a defence against somebody who forges a file on purpose.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

// CRC-32C (Castagnoli, reflected polynomial 0x82f63b78, RFC 3720 appendix B.4): crc32c("123456789") is 0xe3069283.
uint32_t crc32c(const void* bytes, size_t count);

// XXH3 with 128 bits of a text, as 32 lower-case hexadecimal digits, the way `xxhsum -H128` prints it.
std::string xxh3_128(std::string_view text);

// The same of a file that passes by in parts.
class Xxh3Stream {
public:
    Xxh3Stream();
    Xxh3Stream(Xxh3Stream&&) noexcept;
    Xxh3Stream& operator=(Xxh3Stream&&) noexcept;
    ~Xxh3Stream();
    void update(const void* bytes, size_t count);
    std::string hex() const;  // of everything so far

private:
    struct State;
    std::unique_ptr<State> state_;
};
