// SHA-256 and its MAC, by which a rank shows that it knows the run's token without saying it. Ours, since none of the
// libraries that the project needs anyway has a MAC, and since a hundred bytes per rank and run need no speed.
#pragma once

#include <string>
#include <string_view>

// FIPS 180-4; 32 bytes.
std::string sha256(std::string_view text);

// RFC 2104 with SHA-256; 32 bytes.
std::string hmac_sha256(std::string_view key, std::string_view text);

// Whether two texts are equal, in a time that does not tell where they differ.
bool same_secret(std::string_view a, std::string_view b);

// From the system's generator, fit for secrets. Fails with Exit::os where the system has none.
std::string random_bytes(size_t count);

// Two lower-case digits per byte.
std::string hexadecimal(std::string_view bytes);
