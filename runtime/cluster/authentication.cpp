#include "runtime/cluster/authentication.h"

#include <sodium.h>

#include "kernels/check.h"

namespace {

const unsigned char* bytes_of(std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); }

}  // namespace

std::string random_hex(size_t bytes) {
    if (::sodium_init() < 0) fail(Exit::os, "libsodium finds no random number generator on this system");
    std::string random(bytes, '\0'), digits(2 * bytes, '\0');
    ::randombytes_buf(random.data(), bytes);
    ::sodium_bin2hex(digits.data(), digits.size() + 1, bytes_of(random), bytes);
    return digits;
}

std::string hmac_sha256(std::string_view key, std::string_view text) {
    crypto_auth_hmacsha256_state state;
    unsigned char mac[crypto_auth_hmacsha256_BYTES];
    ::crypto_auth_hmacsha256_init(&state, bytes_of(key), key.size());
    ::crypto_auth_hmacsha256_update(&state, bytes_of(text), text.size());
    ::crypto_auth_hmacsha256_final(&state, mac);
    return {std::begin(mac), std::end(mac)};
}

bool is_same_secret(std::string_view a, std::string_view b) {
    return a.size() == b.size() && ::sodium_memcmp(a.data(), b.data(), a.size()) == 0;
}
