#include "kvt_crc.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace kvt {

namespace {

constexpr uint32_t polynomial = 0x82f63b78; // reflected

// tables[i][b]: of byte b with i zero bytes after it. Slicing by 8 (Kounavis, Berry 2005).
using table_set = std::array<std::array<uint32_t, 256>, 8>;

table_set make_tables() {
    table_set tables {};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) {
            crc = (crc >> 1) ^ (crc & 1 ? polynomial : 0);
        }
        tables[0][byte] = crc;
    }
    for (size_t slice = 1; slice < tables.size(); ++slice) {
        for (size_t byte = 0; byte < 256; ++byte) {
            const uint32_t before = tables[slice - 1][byte];
            tables[slice][byte] = (before >> 8) ^ tables[0][before & 0xff];
        }
    }
    return tables;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t by_instruction(const uint8_t * at, size_t bytes, uint32_t crc) {
    uint64_t state = crc;
    for (; bytes >= 8; bytes -= 8, at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, at, sizeof word);
        state = _mm_crc32_u64(state, word);
    }
    uint32_t last = (uint32_t) state;
    for (; bytes > 0; --bytes, ++at) {
        last = _mm_crc32_u8(last, *at);
    }
    return last;
}
#endif

} // namespace

uint32_t crc32c_by_tables(const void * data, size_t bytes, uint32_t crc) {
    static const table_set tables = make_tables();
    const uint8_t * at = static_cast<const uint8_t *>(data);
    crc = ~crc;
    for (; bytes >= 8; bytes -= 8, at += 8) {
        uint32_t next = 0;
        for (unsigned i = 0; i < 8; ++i) {
            const uint8_t byte = i < 4 ? (uint8_t) (at[i] ^ (crc >> 8*i)) : at[i];
            next ^= tables[7 - i][byte];
        }
        crc = next;
    }
    for (; bytes > 0; --bytes, ++at) {
        crc = (crc >> 8) ^ tables[0][(crc ^ *at) & 0xff];
    }
    return ~crc;
}

uint32_t crc32c(const void * data, size_t bytes, uint32_t crc) {
#if defined(__x86_64__)
    static const bool has_instruction = __builtin_cpu_supports("sse4.2");
    if (has_instruction) {
        return ~by_instruction(static_cast<const uint8_t *>(data), bytes, ~crc);
    }
#endif
    return crc32c_by_tables(data, bytes, crc);
}

} // namespace kvt
