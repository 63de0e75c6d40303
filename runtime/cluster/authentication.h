// The cryptography of the rendezvous, from libsodium.
#pragma once

#include <string>
#include <string_view>

// RFC 2104 with SHA-256; 32 bytes. The key may have any length.
std::string hmac_sha256(std::string_view key, std::string_view text);

// Compares in constant time.
bool is_same_secret(std::string_view a, std::string_view b);
