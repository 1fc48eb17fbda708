#include "kvt_named.h"

#include "kvt_images.h"
#include "kvt_sha256.h"

#include "mtmd.h"

#include <atomic>
#include <cstdlib>
#include <exception>

namespace kvt {

namespace {

constexpr uint32_t elsewhere = 1000; // a position that is not the first
std::atomic<bool> taken { false };

place place_at(const mtmd_image_tokens * image, uint32_t from, size_t row) {
    const auto found = mtmd_image_tokens_get_decoder_pos(image, (llama_pos) from, row);
    return { (int32_t) found.t, (int32_t) found.y, (int32_t) found.x };
}

// Of all by which two images differ: content, number of rows, positions.
sha256 digest_of(const char * name, size_t rows, llama_pos positions, const place & last) {
    std::string all = std::string("kvt-image-1 ") + name;
    for (const int64_t number : { (int64_t) rows, (int64_t) positions, (int64_t) last.t, (int64_t) last.y, (int64_t) last.x }) {
        all += " " + std::to_string(number);
    }
    return sha256_of(all.data(), all.size());
}

// With M-RoPE, how many rows stand in the first line; 0 where one position follows the other.
uint32_t columns_of(const mtmd_image_tokens * tokens, uint32_t rows) {
    uint32_t count = rows > 1 && place_at(tokens, 0, 1).t == 0 ? 1 : 0;
    while (count > 0 && count < rows && place_at(tokens, 0, count).y == 0) {
        ++count;
    }
    return count;
}

// Whether its rows have these positions, wherever it begins.
bool has_positions(const mtmd_image_tokens * tokens, const image & one) {
    for (uint32_t row = 0; row < one.rows; ++row) {
        const place here = one.at(row);
        const int32_t by = elsewhere;
        if (!(place_at(tokens, 0, row) == here) || !(place_at(tokens, elsewhere, row) == place { here.t + by, here.y + by, here.x + by })) {
            return false;
        }
    }
    return true;
}

// Of each image whether the next one follows without a word between: llama.cpp may join them to one.
std::vector<bool> touching(const std::string & prompt, const std::string & marker, size_t count) {
    std::vector<bool> found(count, false);
    size_t at = prompt.find(marker);
    for (size_t i = 0; i < count && at != std::string::npos; ++i) {
        const size_t next = prompt.find(marker, at + marker.size());
        found[i] = i + 1 < count && next == at + marker.size();
        at = next;
    }
    return found;
}

} // namespace

void name_images(mtmd::bitmaps & images, const std::vector<std::vector<unsigned char>> & files, const std::string & prompt, const char * marker) try {
    const char * path = std::getenv("OLLAMA_KV_TIER_ENGINE_SOCKET");
    if (path == nullptr || *path == '\0' || images.entries.size() != files.size()) {
        return;
    }
    const auto joined = touching(prompt, marker, files.size());
    std::string after; // of those that follow at once
    for (size_t i = files.size(); i-- > 0;) {
        std::string name = hex_of(sha256_of(files[i].data(), files[i].size()));
        if (joined[i]) {
            name += after;
            name = hex_of(sha256_of(name.data(), name.size()));
        }
        mtmd_bitmap * const image = images.entries[i].ptr.get();
        const bool still = !mtmd_bitmap_is_audio(image) && mtmd_bitmap_get_nx(image) > 0 && mtmd_bitmap_get_ny(image) > 0; // no video
        if (still) {
            mtmd_bitmap_set_id(image, name.c_str());
        }
        after = name;
    }
} catch (const std::exception &) { // without memory an image keeps llama.cpp's name, and what follows it is not tiered
}

void take_images(bool are_taken) { taken.store(are_taken); }

int32_t number_of_chunk(const mtmd_input_chunk * chunk) {
    const auto * tokens = mtmd_input_chunk_get_tokens_image(chunk);
    const char * name   = mtmd_input_chunk_get_id(chunk);
    const auto rows     = (uint32_t) mtmd_input_chunk_get_n_tokens(chunk);
    sha256 content;
    if (!taken.load() || mtmd_input_chunk_get_type(chunk) != MTMD_INPUT_CHUNK_TYPE_IMAGE || tokens == nullptr || name == nullptr || rows == 0 ||
        !from_hex(name, content)) {
        return 0;
    }
    image one;
    one.positions = (uint32_t) mtmd_input_chunk_get_n_pos(chunk);
    one.digest    = digest_of(name, rows, (llama_pos) one.positions, place_at(tokens, 0, rows - 1));
    if (const int32_t known = known_number(one.digest); known != 0) {
        return known;
    }
    one.rows    = rows;
    one.columns = columns_of(tokens, rows);
    return has_positions(tokens, one) ? number_of(one) : 0;
}

} // namespace kvt
