// Blocks out of files.
#pragma once

#include "kvt_lease.h"
#include "kvt_messages.h"
#include "kvt_rows.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvt {

// Where the block that begins there ends, of so many rows in all.
inline uint32_t block_end(uint32_t first, size_t count) { return (uint32_t) std::min<size_t>((size_t) first + block_tokens, count); }

// All of a file's segments, of these sizes, checked, each to its place. A number of `shortfall`. Who reads for long gives the
// lease.
uint32_t read_segments(const file & named, const std::vector<size_t> & segments, const std::vector<char *> & places, lease * held);

// Of segments that lie one after the other.
std::vector<char *> places_in(char * data, const std::vector<size_t> & segments);

// The same, one after the other into `data`.
uint32_t read_segments(const file & named, const std::vector<size_t> & segments, lease & held, char * data);

// The same of a block. `block` has room for `room_bytes` of it, and begins on a page.
uint32_t read_block(const hello & said, const file & named, lease & held, char * block);

// Of a block with so many rows; as in a file, each segment may take whole pages.
size_t room_bytes(const hello & said, uint32_t rows);

// The part of a file that is wanted; no rows if the answer makes no sense.
struct part {
    uint32_t first = 0;
    uint32_t rows = 0;
    uint32_t skip = 0;
};
part wanted_part(const file & one, uint32_t next, uint32_t rows);

} // namespace kvt
