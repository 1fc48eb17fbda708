#include "kvt_crc.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
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

// Multiplying without carry, 64 bytes at a time, takes less time than the instruction (Gopal et al., "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction", 2009). The same as kvtier/crc_amd64.s.
constexpr size_t fold_bytes = 256; // of one turn of its loop

// What a run of 16 bytes is multiplied by to stand a distance further on: over fold_bytes, over 64 bytes, and for the lanes
// of 64 bytes, of which the last stays.
struct fold_by {
    std::array<uint64_t, 2> block, next;
    std::array<uint64_t, 8> lanes;
};

uint64_t power(unsigned n) { // x to the n, modulo the polynomial, reflected
    uint32_t state = 1u << 31;
    for (; n > 0; --n) {
        state = (state >> 1) ^ ((state & 1) != 0 ? polynomial : 0);
    }
    return (uint64_t) state << 1;
}

std::array<uint64_t, 2> over(unsigned bits) { return { power(bits + 32), power(bits - 32) }; }

fold_by make_fold_by() {
    fold_by made { over(8*fold_bytes), over(512), {} };
    for (unsigned i = 0; i < 3; ++i) {
        const auto by = over(384 - 128*i);
        made.lanes[2*i] = by[0];
        made.lanes[2*i + 1] = by[1];
    }
    return made;
}

#define KVT_FOLD __attribute__((target("avx512f,vpclmulqdq,pclmul"))) inline

KVT_FOLD __m512i load(const void * at) { return _mm512_loadu_si512(at); }

KVT_FOLD __m512i broadcast(const std::array<uint64_t, 2> & by) {
    return _mm512_set_epi64((int64_t) by[1], (int64_t) by[0], (int64_t) by[1], (int64_t) by[0], (int64_t) by[1], (int64_t) by[0],
                            (int64_t) by[1], (int64_t) by[0]);
}

// `low` moved on, and what stands there.
KVT_FOLD __m512i moved(__m512i low, __m512i by, __m512i there) {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(low, by, 0x00), _mm512_clmulepi64_epi128(low, by, 0x11), there, 0x96);
}

// 16 bytes with the remainder that so many times fold_bytes have, at least one, behind `state`.
KVT_FOLD std::array<uint64_t, 2> fold(const uint8_t * at, size_t blocks, uint32_t state) {
    static const fold_by by = make_fold_by();
    const __m512i first = _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, state);
    __m512i a = _mm512_xor_si512(load(at), first);
    __m512i b = load(at + 64);
    __m512i c = load(at + 128);
    __m512i d = load(at + 192);
    const __m512i block = broadcast(by.block);
    while (--blocks > 0) {
        at += fold_bytes;
        a = moved(a, block, load(at));
        b = moved(b, block, load(at + 64));
        c = moved(c, block, load(at + 128));
        d = moved(d, block, load(at + 192));
    }
    const __m512i next = broadcast(by.next);
    d = moved(moved(moved(a, next, b), next, c), next, d);
    const __m512i lanes = moved(d, load(by.lanes.data()), _mm512_setzero_si512());
    std::array<uint64_t, 8> each {};
    std::array<uint64_t, 8> last {};
    _mm512_storeu_si512(each.data(), lanes);
    _mm512_storeu_si512(last.data(), d);
    return { each[0] ^ each[2] ^ each[4] ^ last[6], each[1] ^ each[3] ^ each[5] ^ last[7] };
}

uint32_t by_fold(const uint8_t * at, size_t bytes, uint32_t state) {
    const size_t blocks = bytes/fold_bytes;
    if (blocks > 0) {
        const auto rest = fold(at, blocks, state);
        state = by_instruction(reinterpret_cast<const uint8_t *>(rest.data()), sizeof rest, 0);
    }
    return by_instruction(at + blocks*fold_bytes, bytes%fold_bytes, state);
}
#endif

uint32_t by_tables(const uint8_t * at, size_t bytes, uint32_t state) {
    const table_set & known = tables();
    for (; bytes >= 8; bytes -= 8, at += 8) {
        uint32_t next = 0;
        for (unsigned i = 0; i < 8; ++i) {
            const uint8_t byte = i < 4 ? (uint8_t) (at[i] ^ (state >> 8*i)) : at[i];
            next ^= known[7 - i][byte];
        }
        state = next;
    }
    for (; bytes > 0; --bytes, ++at) {
        state = (state >> 8) ^ known[0][(state ^ *at) & 0xff];
    }
    return state;
}

template <uint32_t (*way)(const uint8_t *, size_t, uint32_t)> uint32_t checksum_by(const void * data, size_t bytes, uint32_t crc) {
    return ~way(static_cast<const uint8_t *>(data), bytes, ~crc);
}

} // namespace

std::vector<checksum> crc32c_ways() {
    std::vector<checksum> ways { checksum_by<by_tables> };
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) {
        ways.push_back(checksum_by<by_instruction>);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq")) {
            ways.push_back(checksum_by<by_fold>);
        }
    }
#endif
    return ways;
}

uint32_t crc32c(const void * data, size_t bytes, uint32_t crc) {
    static const checksum fastest = crc32c_ways().back();
    return fastest(data, bytes, crc);
}

} // namespace kvt
