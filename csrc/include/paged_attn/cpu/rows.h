// Rows of K and V: where they lie, and how W values of one become floats.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "paged_attn/cpu/simd.h"
#include "paged_attn/paged_attn.h"

namespace paged_attn::cpu::PA_ISA {

// Values that share one scale in a quantised row.
constexpr int kQuantBlock = 32;

template <pa_dtype T> struct Row;
// value(row, d): values d .. d+W-1 without their block's scale; scale(row, d): that scale.
// both(a, b, d): values d .. d+7 of two rows, one in each half (vectors of 16 only).
#if defined(PA_TWO_ROWS) // simd_avx512.h
#define PA_BOTH(...) static Vec both(const uint8_t *a, const uint8_t *b, int d) { return __VA_ARGS__; }
#else
#define PA_BOTH(...)
#endif
template <> struct Row<PA_F32> {
    static constexpr bool quantised = false;
    static int64_t bytes(int d) { return 4 * int64_t{d}; }
    static Vec value(const uint8_t *row, int d) { return vload(reinterpret_cast<const float *>(row) + d); }
    PA_BOTH(two_f32(reinterpret_cast<const float *>(a) + d, reinterpret_cast<const float *>(b) + d))
    static float scale(const uint8_t *, int) { return 1.0f; }
};
template <> struct Row<PA_F16> {
    static constexpr bool quantised = false;
    static int64_t bytes(int d) { return 2 * int64_t{d}; }
    static Vec value(const uint8_t *row, int d) { return from_f16(reinterpret_cast<const uint16_t *>(row) + d); }
    PA_BOTH(two_f16(reinterpret_cast<const uint16_t *>(a) + d, reinterpret_cast<const uint16_t *>(b) + d))
    static float scale(const uint8_t *, int) { return 1.0f; }
};
template <> struct Row<PA_BF16> {
    static constexpr bool quantised = false;
    static int64_t bytes(int d) { return 2 * int64_t{d}; }
    static Vec value(const uint8_t *row, int d) { return from_bf16(reinterpret_cast<const uint16_t *>(row) + d); }
    PA_BOTH(two_bf16(reinterpret_cast<const uint16_t *>(a) + d, reinterpret_cast<const uint16_t *>(b) + d))
    static float scale(const uint8_t *, int) { return 1.0f; }
};
template <int BlockBytes> struct QuantRow {
    static constexpr bool quantised = true;
    static int64_t bytes(int d) { return int64_t{d} / kQuantBlock * BlockBytes; }
    static const uint8_t *block(const uint8_t *row, int d) { return row + d / kQuantBlock * BlockBytes; }
    static float scale(const uint8_t *row, int d) {
        uint16_t half;
        std::memcpy(&half, block(row, d), 2);
        return f16_to_f32(half);
    }
};
template <> struct Row<PA_Q8_0> : QuantRow<34> {
    static Vec value(const uint8_t *row, int d) {
        return from_i8(reinterpret_cast<const int8_t *>(block(row, d) + 2 + d % kQuantBlock));
    }
    PA_BOTH(two_i8(reinterpret_cast<const int8_t *>(block(a, d) + 2 + d % kQuantBlock),
                   reinterpret_cast<const int8_t *>(block(b, d) + 2 + d % kQuantBlock)))
};
template <> struct Row<PA_Q4_0> : QuantRow<18> {
    static Vec value(const uint8_t *row, int d) { return from_nibbles(block(row, d) + 2, d % kQuantBlock); }
    PA_BOTH(two_nibbles(block(a, d) + 2, block(b, d) + 2, d % kQuantBlock))
};

// n values of a row as floats, scales multiplied in. A lane of `poison` becomes NaN where a value is not finite.
template <pa_dtype T> inline void widen(const uint8_t *row, int n, float *out, Vec &poison) {
    constexpr int step = Row<T>::quantised ? kQuantBlock : W;
    for (int d = 0; d < n; d += step) {
        const Vec scale = vset(Row<T>::scale(row, d));
        PA_UNROLL
        for (int i = d; i < d + step; i += W) {
            Vec value = Row<T>::value(row, i);
            if constexpr (Row<T>::quantised) value = vmul(scale, value);
            poison = vfma(value, vzero(), poison);
            vstore(out + i, value);
        }
    }
}
inline bool poisoned(Vec poison) { return vsum(poison) != 0.0f; } // NaN; finite values leave 0

inline int64_t row_bytes(pa_dtype type, int d) {
    switch (type) {
    case PA_F32: return Row<PA_F32>::bytes(d);
    case PA_F16: return Row<PA_F16>::bytes(d);
    case PA_BF16: return Row<PA_BF16>::bytes(d);
    case PA_Q8_0: return Row<PA_Q8_0>::bytes(d);
    case PA_Q4_0: return Row<PA_Q4_0>::bytes(d);
    }
    return 0;
}

// Calls f with the type as a template argument: with_type(t, [&](auto type) { ... Row<type()> ... }).
template <class F> inline void with_type(pa_dtype type, F &&f) {
    switch (type) {
    case PA_F32: return f(std::integral_constant<pa_dtype, PA_F32>{});
    case PA_F16: return f(std::integral_constant<pa_dtype, PA_F16>{});
    case PA_BF16: return f(std::integral_constant<pa_dtype, PA_BF16>{});
    case PA_Q8_0: return f(std::integral_constant<pa_dtype, PA_Q8_0>{});
    case PA_Q4_0: return f(std::integral_constant<pa_dtype, PA_Q4_0>{});
    }
}

// to[i] = from[i] * f, as results are given.
inline void give(const float *from, float f, int n, float *to) {
    for (int d = 0; d < n; d += W) vstore(to + d, vsettled(vmul(vset(f), vload(from + d))));
}

// The first head's row of a cell.
inline const uint8_t *cell_row(const pa_rows &rows, int32_t cell) {
    if (rows.n_pages == 1) return static_cast<const uint8_t *>(rows.pages[0]) + int64_t{cell} * rows.cell_stride;
    return static_cast<const uint8_t *>(rows.pages[cell / rows.page_cells]) +
           int64_t{cell % rows.page_cells} * rows.cell_stride;
}

// The same of n cells.
inline void cell_rows(const pa_rows &rows, const int32_t *cells, int n, const uint8_t **out) {
    const auto *page = rows.n_pages == 1 ? static_cast<const uint8_t *>(rows.pages[0]) : nullptr;
    if (page != nullptr) {
        const int64_t stride = rows.cell_stride;
        for (int i = 0; i < n; i++) out[i] = page + cells[i] * stride;
    } else {
        for (int i = 0; i < n; i++) out[i] = cell_row(rows, cells[i]);
    }
}

} // namespace paged_attn::cpu::PA_ISA
