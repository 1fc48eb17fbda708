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

// What `state` becomes after `lane` zero bytes. A checksum is linear in its bits, so that those of two pieces join:
// that of A and B is that of A, followed by as many zeros as B has bytes, with that of B added (Gopal et al., "Fast CRC
// Computation for iSCSI Polynomial Using CRC32 Instruction", 2011).
constexpr size_t lane = 1360; // three of them fit the first cache of any processor, with what else is in it

using shift_table = std::array<std::array<uint32_t, 256>, 4>;

shift_table make_shifts(const table_set & tables) {
    shift_table shifts {};
    for (unsigned bit = 0; bit < 32; ++bit) {
        uint32_t state = 1u << bit;
        for (size_t i = 0; i < lane; ++i) {
            state = (state >> 8) ^ tables[0][state & 0xff];
        }
        for (unsigned byte = 0; byte < 256; ++byte) {
            shifts[bit/8][byte] ^= (byte >> bit%8 & 1) != 0 ? state : 0;
        }
    }
    return shifts;
}

const table_set & tables() {
    static const table_set made = make_tables();
    return made;
}

uint32_t behind_lane(uint32_t state) {
    static const shift_table shifts = make_shifts(tables());
    return shifts[0][state & 0xff] ^ shifts[1][state >> 8 & 0xff] ^ shifts[2][state >> 16 & 0xff] ^ shifts[3][state >> 24];
}

#if defined(__x86_64__)
uint64_t word_at(const uint8_t * at) {
    uint64_t word = 0;
    std::memcpy(&word, at, sizeof word);
    return word;
}

// The instruction takes three cycles, and one of them begins in every cycle: three lanes at a time are as fast as memory is.
__attribute__((target("sse4.2"))) uint32_t by_instruction(const uint8_t * at, size_t bytes, uint32_t crc) {
    uint64_t state = crc;
    for (; bytes >= 3*lane; bytes -= 3*lane, at += 3*lane) {
        uint64_t second = 0;
        uint64_t third = 0;
        for (size_t i = 0; i < lane; i += 8) {
            state  = _mm_crc32_u64(state, word_at(at + i));
            second = _mm_crc32_u64(second, word_at(at + lane + i));
            third  = _mm_crc32_u64(third, word_at(at + 2*lane + i));
        }
        state = behind_lane((uint32_t) state) ^ second;
        state = behind_lane((uint32_t) state) ^ third;
    }
    for (; bytes >= 8; bytes -= 8, at += 8) {
        state = _mm_crc32_u64(state, word_at(at));
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
    const table_set & known = tables();
    const uint8_t * at = static_cast<const uint8_t *>(data);
    crc = ~crc;
    for (; bytes >= 8; bytes -= 8, at += 8) {
        uint32_t next = 0;
        for (unsigned i = 0; i < 8; ++i) {
            const uint8_t byte = i < 4 ? (uint8_t) (at[i] ^ (crc >> 8*i)) : at[i];
            next ^= known[7 - i][byte];
        }
        crc = next;
    }
    for (; bytes > 0; --bytes, ++at) {
        crc = (crc >> 8) ^ known[0][(crc ^ *at) & 0xff];
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
