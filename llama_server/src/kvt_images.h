// Images in a prompt. In a list of tokens each row of an image has a number below 0, which names the image in this process: its
// first row one, the rows after it another. So lists with different images differ, and what compares lists need know nothing of
// images. The sidecar is told -1 for each of these rows, and beside the first one the image's digest, an extra of the block's key.
//
// A row's position is not its place in the list: with M-RoPE all rows of an image have one position in time, and two others. Nobody
// goes on within an image: all of it is computed at once, and its rows may see one another.
#pragma once

#include "kvt_messages.h"
#include "kvt_sha256.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvt {

struct place {
    int32_t t = 0; // the row's position
    int32_t y = 0; // with M-RoPE, the two others
    int32_t x = 0;

    bool operator==(const place & other) const { return t == other.t && y == other.y && x == other.x; }
};

struct image {
    sha256 digest {}; // of its content, and of all else by which one is told from another
    uint32_t rows = 0;
    uint32_t positions = 0; // that it takes
    uint32_t columns = 0;   // with M-RoPE: so many of its rows stand in one line. 0: one position follows the other

    place at(uint32_t row) const; // as if it began at position 0
};

// The number of the image's first row, the same in each call for the same digest. 0 where there are too many images, or one without
// rows. In any thread; images, a hundred bytes each, stay for as long as the process.
int32_t number_of(const image & one);

// The same for an image that has a number already; 0 if it has none.
int32_t known_number(const sha256 & digest);

// The number of the rows after its first.
constexpr int32_t number_after(int32_t first) { return first - 1; }

// What the sidecar is told for a token.
constexpr int32_t as_stored(int32_t token) { return token < 0 ? -1 : token; }

bool has_images(const std::vector<int32_t> & tokens, size_t count);

// The images among the first `count`.
std::vector<extra> extras_of(const std::vector<int32_t> & tokens, size_t count);

// The rows of the image that begins there; 1 for a token of text.
uint32_t rows_at(const std::vector<int32_t> & tokens, size_t index);

// The greatest number of rows, at most `count`, after which a prompt goes on: not within an image.
uint32_t resumable(const std::vector<int32_t> & tokens, uint32_t count);

// The same for a slot of which `have` rows are asked to be added to: the block that row lies in begins in no image either.
uint32_t askable(const std::vector<int32_t> & tokens, uint32_t have);

// Of the rows [first, first + count).
std::vector<place> places_of(const std::vector<int32_t> & tokens, uint32_t first, uint32_t count);

// Of the row at this index, or of the one that would follow the last.
int32_t position_at(const std::vector<int32_t> & tokens, uint32_t index);

// How many tokens it takes to come to this position, or beyond it; as llama-server counts them.
uint32_t tokens_up_to(const std::vector<int32_t> & tokens, int32_t position);

} // namespace kvt
