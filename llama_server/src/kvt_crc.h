// CRC-32C (Castagnoli, RFC 3720 appendix B.4), the checksum of every segment of a block file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvt {

// Of `bytes` bytes; `crc` is that of what came before them, 0 at the beginning.
uint32_t crc32c(const void * data, size_t bytes, uint32_t crc = 0);

using checksum = uint32_t (*)(const void * data, size_t bytes, uint32_t crc);

// All ways in which this processor can compute it; the last is the fastest, which crc32c() takes. For tests.
std::vector<checksum> crc32c_ways();

} // namespace kvt
