#include "kvt_sha256.h"

#include <algorithm>
#include <cstring>

namespace kvt {

namespace {

constexpr size_t chunk_bytes = 64;

constexpr uint32_t rounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

uint32_t turned(uint32_t value, int by) { return value >> by | value << (32 - by); }

void take(std::array<uint32_t, 8> & state, const uint8_t * chunk) {
    uint32_t words[64];
    for (size_t i = 0; i < 16; ++i) {
        words[i] = (uint32_t) chunk[4*i] << 24 | (uint32_t) chunk[4*i + 1] << 16 | (uint32_t) chunk[4*i + 2] << 8 | chunk[4*i + 3];
    }
    for (size_t i = 16; i < 64; ++i) {
        const uint32_t a = words[i - 15], b = words[i - 2];
        words[i] = words[i - 16] + (turned(a, 7) ^ turned(a, 18) ^ a >> 3) + words[i - 7] + (turned(b, 17) ^ turned(b, 19) ^ b >> 10);
    }
    auto now = state;
    auto & [a, b, c, d, e, f, g, h] = now;
    for (size_t i = 0; i < 64; ++i) {
        const uint32_t one = h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & f) ^ (~e & g)) + rounds[i] + words[i];
        const uint32_t two = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g;
        g = f;
        f = e;
        e = d + one;
        d = c;
        c = b;
        b = a;
        a = one + two;
    }
    for (size_t i = 0; i < 8; ++i) {
        state[i] += now[i];
    }
}

} // namespace

sha256 sha256_of(const void * data, size_t bytes) {
    std::array<uint32_t, 8> state { 0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19 };
    const auto * at = static_cast<const uint8_t *>(data);
    size_t left = bytes;
    for (; left >= chunk_bytes; left -= chunk_bytes, at += chunk_bytes) {
        take(state, at);
    }
    uint8_t last[2*chunk_bytes] = {};
    if (left > 0) {
        std::memcpy(last, at, left);
    }
    last[left] = 0x80;
    const size_t padded = left < chunk_bytes - 8 ? chunk_bytes : 2*chunk_bytes;
    for (size_t i = 0; i < 8; ++i) {
        last[padded - 1 - i] = (uint8_t) ((uint64_t) bytes*8 >> 8*i);
    }
    for (size_t i = 0; i < padded; i += chunk_bytes) {
        take(state, last + i);
    }
    sha256 digest {};
    for (size_t i = 0; i < digest.size(); ++i) {
        digest[i] = (uint8_t) (state[i/4] >> (24 - 8*(i%4)));
    }
    return digest;
}

std::string hex_of(const sha256 & digest) {
    std::string text;
    for (const uint8_t byte : digest) {
        text += "0123456789abcdef"[byte >> 4];
        text += "0123456789abcdef"[byte & 15];
    }
    return text;
}

bool from_hex(const std::string & text, sha256 & digest) {
    const std::string digits = "0123456789abcdef";
    if (text.size() != 2*digest.size() || text.find_first_not_of(digits) != std::string::npos) {
        return false;
    }
    for (size_t i = 0; i < digest.size(); ++i) {
        digest[i] = (uint8_t) (digits.find(text[2*i])*16 + digits.find(text[2*i + 1]));
    }
    return true;
}

} // namespace kvt
