#include "tests/exact_model.h"

#include "reference/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kTile = 48, kChunk = 16 * kTile;
constexpr float kLog2e = 1.4426950408889634f, kNone = -std::numeric_limits<float>::infinity();

// Denormals are zero, sums and products are rounded to nearest.
struct FloatMode {
#if defined(__x86_64__)
    unsigned saved = _mm_getcsr();
    FloatMode() { _mm_setcsr((saved & ~0x6000u) | 0x8040u); }
    ~FloatMode() { _mm_setcsr(saved); }
#elif defined(__aarch64__)
    unsigned long saved;
    FloatMode() {
        asm volatile("mrs %0, fpcr" : "=r"(saved));
        asm volatile("msr fpcr, %0" : : "r"((saved & ~(3ul << 22)) | 1ul << 24));
    }
    ~FloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved)); }
#endif
};

float power(float y) { // 2^y for an integer y
    if (std::isnan(y)) return y;
    return y < -125.0f ? 0.0f : std::ldexp(1.0f, static_cast<int>(y));
}

float exp2_over(float x, float m) {
    const float n = std::nearbyint(x), y = n - m;
    if (y < -125.0f) return 0.0f;
    const float r = x - n;
    float p = 1.327647177e-3f;
    for (const float c : {9.675541333e-3f, 5.550713274e-2f, 2.402211972e-1f, 6.931469671e-1f, 1.000000072f}) p = std::fma(p, r, c);
    return p * power(y);
}

struct Seen {
    int32_t cell, place;
    float bias; // base 2
};

// What query `query` sees, ascending by place.
std::vector<Seen> seen_by(const pa_args &args, int32_t query) {
    std::vector<Seen> seen;
    const pa_mask &mask = args.mask;
    bool positions = mask.cell_pos != nullptr;
    for (int32_t c = 0; c < args.n_cells; c++) {
        const double bias = paged_attn::mask_bias(mask, query, c);
        if (bias == -std::numeric_limits<double>::infinity()) continue;
        seen.push_back({c, mask.cell_pos ? mask.cell_pos[c] : c, static_cast<float>(bias) * kLog2e});
        positions = positions && mask.cell_pos[c] >= 0;
    }
    const auto by_place = [](const Seen &a, const Seen &b) { return a.place < b.place; };
    const auto same = [](const Seen &a, const Seen &b) { return a.place == b.place; };
    std::vector<Seen> sorted = seen;
    std::sort(sorted.begin(), sorted.end(), by_place);
    if (positions && std::adjacent_find(sorted.begin(), sorted.end(), same) == sorted.end()) return sorted;
    for (Seen &one : seen) one.place = one.cell;
    return seen;
}

struct State {
    float m = kNone, l = 0.0f;
    std::vector<float> o;
};

float dot(const std::vector<float> &q, const std::vector<float> &k) {
    float chain[8] = {};
    for (size_t d = 0; d < q.size(); d++) chain[d % 8] = std::fma(k[d], q[d], chain[d % 8]);
    float four[4];
    for (size_t i = 0; i < 4; i++) four[i] = chain[i] + chain[i + 4];
    return (four[0] + four[1]) + (four[2] + four[3]);
}

float capped(float x, float cap) {
    if (cap == 0.0f) return x;
    float y = (2.0f * kLog2e / cap) * x;
    if (y > 60.0f) y = 60.0f;
    return cap - 2.0f * cap / (1.0f + exp2_over(y, 0.0f));
}

// The cells [from, to) of one tile join the state of their chunk.
void add_tile(const pa_shape &shape, const pa_args &args, int32_t kv_head, const std::vector<float> &q, const Seen *from,
              const Seen *to, State &state) {
    std::vector<float> k(q.size()), v(state.o.size()), s, sums(state.o.size(), 0.0f);
    float top = -1e30f;
    for (const Seen *at = from; at < to; at++) {
        paged_attn::dequantise(args.k, shape.k_type, shape.d_k, at->cell, kv_head, k.data());
        const float x = capped(dot(q, k), shape.softcap * kLog2e) + at->bias;
        s.push_back(x);
        if (x > top) top = x;
    }
    float shrink = 1.0f;
    if (top > -1e29f && (state.m == kNone || top > state.m + 16.0f)) {
        const float up = std::ceil(top);
        shrink = state.m == kNone ? 0.0f : power(state.m - up);
        state.m = up;
    }
    float chain[16] = {};
    for (const Seen *at = from; at < to; at++) {
        const float p = exp2_over(s[size_t(at - from)], state.m == kNone ? 0.0f : state.m);
        chain[at->place % 16] += p;
        paged_attn::dequantise(args.v, shape.v_type, shape.d_v, at->cell, kv_head, v.data());
        for (size_t d = 0; d < v.size(); d++) sums[d] = std::fma(v[d], p, sums[d]);
    }
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) chain[i] += chain[i + half];
    state.l = std::fma(state.l, shrink, chain[0]);
    for (size_t d = 0; d < sums.size(); d++) state.o[d] = std::fma(shrink, state.o[d], sums[d]);
}

void join(State &all, const State &chunk) {
    const float up = std::max(all.m, chunk.m);
    const float a = all.m == kNone ? 0.0f : power(all.m - up), b = chunk.m == kNone ? 0.0f : power(chunk.m - up);
    all.m = up;
    all.l = std::fma(b, chunk.l, a * all.l);
    for (size_t d = 0; d < all.o.size(); d++) all.o[d] = std::fma(b, chunk.o[d], a * all.o[d]);
}

} // namespace

void exact_model(const pa_shape &shape, const pa_args &args, float *out) {
    const FloatMode mode;
    const float factor = shape.scale * kLog2e;
    for (int32_t query = 0; query < args.n_q; query++) {
        const std::vector<Seen> seen = seen_by(args, query);
        for (int32_t head = 0; head < shape.n_head; head++) {
            const auto *row = reinterpret_cast<const float *>(reinterpret_cast<const char *>(args.q) + query * args.q_stride +
                                                              head * args.q_head_stride);
            std::vector<float> q(row, row + shape.d_k);
            for (float &value : q) value *= factor;
            State all, chunk;
            all.o.assign(size_t(shape.d_v), 0.0f);
            chunk.o = all.o;
            for (size_t i = 0, end; i < seen.size(); i = end) {
                for (end = i; end < seen.size() && seen[end].place / kTile == seen[i].place / kTile;) end++;
                add_tile(shape, args, head / (shape.n_head / shape.n_kv_head), q, seen.data() + i, seen.data() + end, chunk);
                if (end < seen.size() && seen[end].place / kChunk == seen[i].place / kChunk) continue;
                join(all, chunk);
                chunk = State();
                chunk.o.assign(size_t(shape.d_v), 0.0f);
            }
            float f = 1.0f;
            if (args.sinks && args.sinks[head] != kNone) {
                const float sink = args.sinks[head] * kLog2e, up = std::max(all.m, std::ceil(sink));
                f = all.m == kNone ? 0.0f : power(all.m - up);
                all.l = all.l * f + exp2_over(sink, up);
            }
            f *= all.l == 0.0f ? 0.0f : 1.0f / all.l;
            for (int32_t d = 0; d < shape.d_v; d++) {
                const float value = all.o[size_t(d)] * f;
                *out++ = std::isfinite(value) ? value + 0.0f : std::numeric_limits<float>::quiet_NaN();
            }
        }
    }
}
