// Numbers, texts and lists of the engine socket as bytes (docs/engine-protocol.md). Little endian, no padding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvt {

// Puts the body of a frame together.
class writer {
public:
    void u8(uint8_t value) { number(value, 1); }
    void u16(uint16_t value) { number(value, 2); }
    void u32(uint32_t value) { number(value, 4); }
    void u64(uint64_t value) { number(value, 8); }
    void f64(double value);
    void raw(const void * data, size_t bytes);
    void text(const std::string & value); // cut at 65,535 bytes

    const std::string & body() const { return body_; }

private:
    void number(uint64_t value, int bytes);

    std::string body_;
};

// Takes a body apart. Once something does not fit, ok() is false, and all that is read is 0 or empty.
class reader {
public:
    reader(const char * data, size_t bytes) : at_(data), end_(data + bytes) {}

    uint8_t u8() { return (uint8_t) number(1); }
    uint16_t u16() { return (uint16_t) number(2); }
    uint32_t u32() { return (uint32_t) number(4); }
    uint64_t u64() { return number(8); }
    std::string text();
    std::vector<uint32_t> numbers(); // a list of u32

    // How many entries a list has, each of at least so many bytes; 0 if there are not so many bytes left.
    uint32_t count(size_t entry_bytes);

    bool ok() const { return ok_; }
    bool whole() const { return ok_ && at_ == end_; } // all was read, and nothing is left over

private:
    uint64_t number(int bytes);
    bool has(size_t bytes);

    const char * at_;
    const char * end_;
    bool ok_ = true;
};

} // namespace kvt
