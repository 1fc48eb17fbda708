// Block files as an engine sees them: segments from an offset on, each on a page of its own, each with a checksum.
#pragma once

#include "kvt_messages.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvt {

constexpr size_t page_bytes = 4096;
constexpr size_t state_part_bytes = 16u << 20; // of a state, in one segment

size_t page_aligned(size_t bytes);

// Bytes of the segments of a block with so many rows, in their order: by layer, K before V.
std::vector<size_t> segment_bytes(const hello & said, uint32_t rows);

// Bytes of the segments of a state.
std::vector<size_t> state_segments(uint64_t bytes);

// Closes a descriptor, whatever is thrown meanwhile.
class opened {
public:
    explicit opened(int fd) : fd_(fd) {}
    ~opened();
    opened(const opened &) = delete;
    opened & operator=(const opened &) = delete;

private:
    const int fd_;
};

// A descriptor, or -1 and why not: a link, no regular file, of another size or owner, or one that others may write.
int open_for_reading(const file & named, std::string & why);

// The same for a block or state of these segments: also not, where they do not fill the file, or it is none that waits for one.
int open_for_writing(const reserved & named, const std::vector<size_t> & segments, std::string & why);

// Reads a segment into memory of the engine's own, and compares it there. False and why, if a byte is not as it was written.
bool read_segment(int fd, uint64_t offset, void * data, size_t bytes, uint32_t crc, std::string & why);

// What of a file is in the page cache leaves it.
void forget_pages(int fd);

// The first `bytes` of the payload, past the page cache where the file system can, else it is dropped from there: what comes
// back is used once, and should push nothing out, first of all the model's weights. `to` begins on a page, and `bytes` are
// whole pages. Nothing is checked. False and why, if the file cannot be read or is shorter.
bool read_payload(const file & named, char * to, size_t bytes, std::string & why);

// Writes a segment; `crc` is what COMMIT needs of it.
bool write_segment(int fd, uint64_t offset, const void * data, size_t bytes, uint32_t & crc, std::string & why);

// Fills a reserved file with segments that lie one after the other in memory; `done` is what COMMIT needs. False if it cannot be.
bool write_segments(const reserved & named, const char * data, const std::vector<size_t> & segments, filled & done);

} // namespace kvt
