// The last columns of repacked weights are a four, of which the rest is zero; built by
// tests/integration/test_exact_library.py.
#include "exactattn_repack.h"
#include <cstdio>

// Columns of 3 values, 5 of each of 2 planes; a column is "quantised" to 3 floats.
static void quantise(const float * x, void * y, int64_t n, int64_t length) {
    std::memcpy(y, x, (size_t) (n*length)*sizeof(float));
}

// Two rows of weights: the sum of a column, and twice that.
static void multiply(int length, float * s, size_t stride, const void *, const void * y, int n, int rows) {
    for (int c = 0; c < n; ++c) {
        float sum = 0;
        for (int i = 0; i < length; ++i) { sum += static_cast<const float *>(y)[c*length + i]; }
        for (int r = 0; r < rows; ++r) { s[(size_t) c*stride + (size_t) r] = sum*(float) (r + 1); }
    }
}

int main() {
    using namespace exactattn;
    const size_t column = 3*sizeof(float);
    const float from[] = { 1, 2, 3, 0, 4, 5, 6, 0 }; // two columns, four floats from one to the next
    std::vector<char> work(2*5*column + last_bytes(column, 2), (char) 0x7f);
    const size_t before = last_offset(column, 5, 2, 0), at = last_offset(column, 5, 2, 1);
    if (before != 2*5*column || at != before + 4*column || at + 4*column != work.size()) { return 1; }
    quantise_last(quantise, reinterpret_cast<const char *>(from), 4*sizeof(float), 2, 3, work.data() + at);
    float four[12];
    std::memcpy(four, work.data() + at, sizeof four);
    const float wanted[12] = { 1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0 };
    if (std::memcmp(four, wanted, sizeof four) != 0) { return 2; }
    float to[] = { -1, -1, -1, -1, -1, -1 }; // three floats from one column to the next
    multiply_last(multiply, 3, nullptr, work.data() + at, 2, reinterpret_cast<char *>(to), 3*sizeof(float), 2);
    const float sums[] = { 6, 12, -1, 15, 30, -1 };
    return std::memcmp(to, sums, sizeof to) != 0 ? 3 : 0;
}
