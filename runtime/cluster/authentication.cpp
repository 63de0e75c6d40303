#include "runtime/cluster/authentication.h"

#include <sodium.h>

namespace {

const unsigned char* bytes_of(std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); }

}  // namespace

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
