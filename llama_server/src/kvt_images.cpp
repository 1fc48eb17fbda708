#include "kvt_images.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <mutex>

namespace kvt {

namespace {

constexpr size_t most_images = 1u << 20;

struct all_images {
    std::mutex mutex;
    std::map<sha256, int32_t> numbers;
    std::deque<image> images; // one does not move when another comes
};

all_images & all() {
    static all_images & made = *new all_images; // threads that were left behind may still ask
    return made;
}

constexpr int32_t number(size_t index) { return -2 - 2*(int32_t) index; }
constexpr bool is_first(int32_t token) { return token < -1 && token%2 == 0; }

const image & image_of(int32_t token) {
    auto & known = all();
    std::lock_guard<std::mutex> lock(known.mutex);
    return known.images.at((size_t) (-token/2 - 1));
}

// Calls each(index, rows, image or nullptr) for each token of text and each image that begins among the first `count`, until it
// returns false.
template <typename F> void walk(const std::vector<int32_t> & tokens, size_t count, F && each) {
    for (size_t i = 0; i < count && i < tokens.size();) {
        const image * one = is_first(tokens[i]) ? &image_of(tokens[i]) : nullptr;
        const size_t rows = one != nullptr ? one->rows : 1;
        if (!each((uint32_t) i, (uint32_t) rows, one)) {
            return;
        }
        i += rows;
    }
}

} // namespace

place image::at(uint32_t row) const {
    const auto one = (int32_t) row;
    const auto wide = (int32_t) columns;
    return columns == 0 ? place { one, one, one } : place { 0, one/wide, one%wide };
}

int32_t number_of(const image & one) {
    auto & known = all();
    std::lock_guard<std::mutex> lock(known.mutex);
    const auto found = known.numbers.find(one.digest);
    if (found != known.numbers.end()) {
        return found->second;
    }
    if (one.rows == 0 || known.images.size() >= most_images) {
        return 0;
    }
    known.images.push_back(one);
    return known.numbers[one.digest] = number(known.images.size() - 1);
}

int32_t known_number(const sha256 & digest) {
    auto & known = all();
    std::lock_guard<std::mutex> lock(known.mutex);
    const auto found = known.numbers.find(digest);
    return found != known.numbers.end() ? found->second : 0;
}

bool has_images(const std::vector<int32_t> & tokens, size_t count) {
    const auto end = tokens.begin() + (std::ptrdiff_t) std::min(count, tokens.size());
    return std::any_of(tokens.begin(), end, [](int32_t token) { return token < 0; });
}

std::vector<extra> extras_of(const std::vector<int32_t> & tokens, size_t count) {
    std::vector<extra> found;
    for (size_t i = 0; i < std::min(count, tokens.size()); ++i) {
        if (is_first(tokens[i])) {
            found.push_back({ (uint32_t) i, image_of(tokens[i]).digest });
        }
    }
    return found;
}

uint32_t rows_at(const std::vector<int32_t> & tokens, size_t index) {
    return is_first(tokens[index]) ? image_of(tokens[index]).rows : 1;
}

uint32_t resumable(const std::vector<int32_t> & tokens, uint32_t count) {
    if (!has_images(tokens, count)) {
        return count;
    }
    uint32_t end = 0;
    walk(tokens, count, [&](uint32_t index, uint32_t rows, const image *) {
        end = index + rows <= count ? index + rows : index;
        return index + rows <= count;
    });
    return end;
}

uint32_t askable(const std::vector<int32_t> & tokens, uint32_t have) {
    uint32_t asked = resumable(tokens, have);
    for (;;) {
        const uint32_t begin = asked/block_tokens*block_tokens;
        const uint32_t whole = resumable(tokens, begin);
        if (whole == begin) {
            return asked;
        }
        asked = whole;
    }
}

std::vector<place> places_of(const std::vector<int32_t> & tokens, uint32_t first, uint32_t count) {
    std::vector<place> found;
    found.reserve(count);
    const size_t end = (size_t) first + count;
    int32_t at = 0;
    uint32_t from = 0;
    if (!has_images(tokens, end)) {
        from = first;
        at = (int32_t) first;
    }
    for (size_t i = from; i < end;) {
        const image * one = i < tokens.size() && is_first(tokens[i]) ? &image_of(tokens[i]) : nullptr;
        const uint32_t rows = one != nullptr ? one->rows : 1;
        for (uint32_t row = 0; row < rows && i + row < end; ++row) {
            if (i + row >= first) {
                const place within = one != nullptr ? one->at(row) : place();
                found.push_back({ at + within.t, at + within.y, at + within.x });
            }
        }
        at += one != nullptr ? (int32_t) one->positions : 1;
        i += rows;
    }
    return found;
}

int32_t position_at(const std::vector<int32_t> & tokens, uint32_t index) { return places_of(tokens, index, 1).front().t; }

uint32_t tokens_up_to(const std::vector<int32_t> & tokens, int32_t position) {
    uint32_t end = 0;
    int32_t at = 0;
    walk(tokens, tokens.size(), [&](uint32_t index, uint32_t rows, const image * one) {
        at += one != nullptr ? (int32_t) one->positions : 1;
        end = index + rows;
        return at < position;
    });
    return end;
}

} // namespace kvt
