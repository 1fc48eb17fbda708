// SHA-256 (FIPS 180-4), by which images are told apart.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace kvt {

using sha256 = std::array<uint8_t, 32>;

sha256 sha256_of(const void * data, size_t bytes);

std::string hex_of(const sha256 & digest);

// False if these are not 64 hex digits, as hex_of() writes them.
bool from_hex(const std::string & text, sha256 & digest);

} // namespace kvt
