// CRC-32C (Castagnoli, RFC 3720 appendix B.4), the checksum of every segment of a block file.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvt {

// Of `bytes` bytes; `crc` is that of what came before them, 0 at the beginning.
uint32_t crc32c(const void * data, size_t bytes, uint32_t crc = 0);

// The same by tables, for processors without an instruction for it, and for tests.
uint32_t crc32c_by_tables(const void * data, size_t bytes, uint32_t crc = 0);

} // namespace kvt
