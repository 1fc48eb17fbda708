#include "kvt_fingerprint.h"

#include "kvt_crc.h"

namespace kvt {

namespace {

constexpr uint32_t ieee_polynomial = 0xedb88320; // CRC-32 of IEEE 802.3, reflected

uint32_t crc32(const std::vector<uint8_t> & data) {
    uint32_t state = UINT32_MAX;
    for (const uint8_t byte : data) {
        state ^= byte;
        for (int bit = 0; bit < 8; ++bit) {
            state = (state >> 1) ^ ((state & 1) != 0 ? ieee_polynomial : 0);
        }
    }
    return ~state;
}

} // namespace

fingerprint fingerprint_of(const std::vector<uint32_t> & crcs) {
    std::vector<uint8_t> bytes;
    bytes.reserve(4*crcs.size());
    for (const uint32_t crc : crcs) {
        for (int shift = 0; shift < 32; shift += 8) {
            bytes.push_back((uint8_t) (crc >> shift));
        }
    }
    return (fingerprint) crc32(bytes) << 32 | crc32c(bytes.data(), bytes.size());
}

fingerprint fingerprint_of(const char * data, const std::vector<size_t> & segments) {
    std::vector<uint32_t> crcs;
    crcs.reserve(segments.size());
    for (const size_t bytes : segments) {
        crcs.push_back(crc32c(data, bytes));
        data += bytes;
    }
    return fingerprint_of(crcs);
}

} // namespace kvt
