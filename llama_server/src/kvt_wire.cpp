#include "kvt_wire.h"

#include <algorithm>
#include <cstring>

namespace kvt {

void writer::number(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) {
        body_.push_back((char) ((value >> 8*i) & 0xff));
    }
}

void writer::f64(double value) {
    uint64_t bits = 0;
    static_assert(sizeof bits == sizeof value, "an IEEE double");
    std::memcpy(&bits, &value, sizeof bits);
    u64(bits);
}

void writer::raw(const void * data, size_t bytes) {
    body_.append(static_cast<const char *>(data), bytes);
}

void writer::text(const std::string & value) {
    const size_t bytes = std::min<size_t>(value.size(), 0xffff);
    u16((uint16_t) bytes);
    raw(value.data(), bytes);
}

bool reader::has(size_t bytes) {
    ok_ = ok_ && bytes <= (size_t) (end_ - at_);
    return ok_;
}

uint64_t reader::number(int bytes) {
    if (!has((size_t) bytes)) {
        return 0;
    }
    uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) {
        value |= (uint64_t) (uint8_t) *at_++ << 8*i;
    }
    return value;
}

std::string reader::text() {
    const size_t bytes = u16();
    if (!has(bytes)) {
        return {};
    }
    std::string value(at_, bytes);
    at_ += bytes;
    return value;
}

uint32_t reader::count(size_t entry_bytes) {
    const uint32_t entries = u32();
    return has((size_t) entries*entry_bytes) ? entries : 0;
}

std::vector<uint32_t> reader::numbers() {
    std::vector<uint32_t> values(count(4));
    for (auto & value : values) {
        value = u32();
    }
    return values;
}

} // namespace kvt
