// SHA-256 and HMAC-SHA256, for the handshake alone. Our own because the core links no library that
// has them: the wheel must load wherever Python does, beside whatever OpenSSL the program brings.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace dpt {

using Digest = std::array<uint8_t, 32>;

// FIPS 180-4.
Digest sha256(std::string_view message);
// RFC 2104.
Digest hmac_sha256(std::string_view key, std::string_view message);

// Takes the same time wherever the two differ.
bool equal_in_constant_time(const Digest& a, const Digest& b);

}  // namespace dpt
