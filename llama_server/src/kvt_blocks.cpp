#include "kvt_blocks.h"

#include "kvt_crc.h"
#include "kvt_file.h"
#include "kvt_restore.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace kvt {

uint32_t read_segments(const file & named, const std::vector<size_t> & segments, const std::vector<char *> & places, lease * held) {
    std::string why;
    const bool fits = segments.size() == named.crcs.size() && segments.size() == places.size();
    const int fd = fits ? open_for_reading(named, why) : -1;
    if (fd < 0) {
        return shortfall_unreadable;
    }
    const opened closes(fd);
    uint64_t offset = named.payload_offset;
    bool sound = true;
    for (size_t i = 0; i < segments.size() && sound; ++i) {
        if (held != nullptr) {
            held->renew_in_time();
        }
        sound = read_segment(fd, offset, places[i], segments[i], named.crcs[i], why);
        offset += page_aligned(segments[i]);
    }
    if (named.tier != memory_tier) {
        forget_pages(fd);
    }
    return sound ? shortfall_none : shortfall_damaged;
}

uint32_t read_segments(const file & named, const std::vector<size_t> & segments, lease & held, char * data) {
    return read_segments(named, segments, places_in(data, segments), &held);
}

std::vector<char *> places_in(char * data, const std::vector<size_t> & segments) {
    std::vector<char *> places;
    for (const size_t bytes : segments) {
        places.push_back(data);
        data += bytes;
    }
    return places;
}

uint32_t read_block(const hello & said, const file & named, lease & held, char * block) {
    const auto segments = segment_bytes(said, named.rows);
    if (named.tier == memory_tier) {
        return read_segments(named, segments, held, block);
    }
    held.renew_in_time();
    std::string why;
    if (segments.size() != named.crcs.size() || !read_payload(named, block, room_bytes(said, named.rows), why)) {
        return shortfall_unreadable;
    }
    const char * from = block;
    for (size_t i = 0; i < segments.size(); ++i) {
        if (crc32c(from, segments[i]) != named.crcs[i]) {
            return shortfall_damaged;
        }
        if (from != block) {
            std::memmove(block, from, segments[i]);
        }
        block += segments[i];
        from += page_aligned(segments[i]);
    }
    return shortfall_none;
}

size_t room_bytes(const hello & said, uint32_t rows) {
    size_t bytes = 0;
    for (size_t size : segment_bytes(said, rows)) {
        bytes += page_aligned(size);
    }
    return bytes;
}

part wanted_part(const file & one, uint32_t next, uint32_t rows) {
    const uint64_t end = std::min<uint64_t>((uint64_t) one.first_position + one.used, rows);
    if (one.rows == 0 || one.rows > block_tokens || one.used > one.rows || one.first_position > next || end <= next) {
        return {};
    }
    return { next, (uint32_t) end - next, next - one.first_position };
}

size_t block_bytes(const hello & said, uint32_t rows) {
    size_t bytes = 0;
    for (size_t size : segment_bytes(said, rows)) {
        bytes += size;
    }
    return bytes;
}

} // namespace kvt
