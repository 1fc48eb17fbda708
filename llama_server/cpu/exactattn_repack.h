// Repacked weights (Q4_K and others): one order of sums for every number of columns.
//
// GGML multiplies columns by fours (gemm) and the last n % 4 one by one (gemv), which sums in another order. Here the last ones are a
// four, too, of which the rest is zero: quantised as the others are, behind all columns of the work memory, one four for each plane.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace exactattn {

constexpr int64_t columns = 4;

// Bytes of the fours, of so many planes, whose quantised columns have so many bytes.
inline size_t last_bytes(size_t column_bytes, int64_t planes) { return (size_t) (columns*planes)*column_bytes; }

// Where that of a plane begins.
inline size_t last_offset(size_t column_bytes, int64_t columns_of_plane, int64_t planes, int64_t plane) {
    return column_bytes*(size_t) (columns_of_plane*planes + columns*plane);
}

// Quantises the last `count` columns of `length` values each, `stride` bytes from one to the next.
template <typename Quantise>
void quantise_last(Quantise quantise, const char * from, size_t stride, int64_t count, int64_t length, void * to) {
    static thread_local std::vector<float> four;
    four.assign((size_t) (columns*length), 0.0f);
    for (int64_t i = 0; i < count; ++i) {
        std::memcpy(four.data() + i*length, from + (size_t) i*stride, (size_t) length*sizeof(float));
    }
    quantise(four.data(), to, columns, length);
}

// Multiplies `rows` rows of weights with a four, and keeps the first `count` columns: at `to`, `stride` bytes from one to the next.
template <typename Multiply>
void multiply_last(Multiply multiply, int length, const void * weights, const void * four, int64_t rows, char * to, size_t stride,
                   int64_t count) {
    static thread_local std::vector<float> all;
    all.resize((size_t) (columns*rows));
    multiply(length, all.data(), (size_t) rows, weights, four, (int) columns, (int) rows);
    for (int64_t i = 0; i < count; ++i) {
        std::memcpy(to + (size_t) i*stride, all.data() + i*rows, (size_t) rows*sizeof(float));
    }
}

} // namespace exactattn
