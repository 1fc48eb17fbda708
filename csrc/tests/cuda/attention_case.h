// A small attention problem with everything in it: K/V rows of any type in shuffled pages, masks, sinks; and its answer
// in f64, one key after another.
#pragma once
#include "emulate/device.h"

#include "cuda/rows.cuh"

#include <random>
#include <string>
#include <vector>

namespace paged_attn::gpu::test {

// The first ones have empty cells everywhere and positions out of order, so that every tile is asked cell by cell; of the
// solid ones many tiles are seen whole, and are not asked.
enum class MaskKind { none, causal, window, sequences, dense, hidden, solid, solid_window, solid_sequences };

struct CaseSpec {
    int n_q = 1, n_head = 5, n_kv_head = 1, n_cells = 100, page_cells = 32;
    MaskKind mask = MaskKind::causal;
    float softcap = 0.0f;
    bool sinks = false, peaked = false;
    int n_splits = 1, n_chunks = 1; // chunks: one launch each, whose state joins the one before
    float sink_nats = 0.0f; // > 0: the logit of cell 0 is that much above the others, and its V is small: a sink and a tail
};

struct RowStore { // rows of K or of V as the cache holds them, and their values
    std::vector<std::vector<char>> pages;
    std::vector<const char *> table;
    long long cell_stride = 0, head_stride = 0;
    std::vector<float> values; // [cell][head][d]
};

inline size_t row_bytes(RowType type, int d) {
    return static_cast<size_t>(type == kQ8 ? d / 32 * 34 : type == kQ4 ? d / 32 * 18 : d * 2);
}

// Writes a row of d values in `type`; replaces them by what the type holds.
inline void write_row(RowType type, float *x, int d, char *to) {
    const auto put16 = [](char *at, unsigned v) {
        const auto h = static_cast<unsigned short>(v);
        std::memcpy(at, &h, 2);
    };
    if (!is_blocked(type)) {
        for (int i = 0; i < d; i++) {
            const unsigned bits = type == kF16 ? f32_to_f16(x[i]) : f32_to_bf16(x[i]);
            put16(to + 2 * i, bits);
            x[i] = type == kF16 ? f16_to_f32(static_cast<unsigned short>(bits)) : as_float(bits << 16);
        }
        return;
    }
    for (int block = 0; block < d / 32; block++, x += 32, to += type == kQ8 ? 34 : 18) {
        float most = 0.0f;
        for (int i = 0; i < 32; i++) most = std::fabs(x[i]) > std::fabs(most) ? x[i] : most;
        const unsigned short bits = f32_to_f16(type == kQ8 ? std::fabs(most) / 127.0f : most / -8.0f);
        const float scale = f16_to_f32(bits), inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
        put16(to, bits);
        if (type == kQ4) std::memset(to + 2, 0, 16);
        for (int i = 0; i < 32; i++) {
            const int low = type == kQ8 ? -127 : -8, high = type == kQ8 ? 127 : 7;
            const int n = std::min(high, std::max(low, static_cast<int>(std::lround(x[i] * inverse))));
            if (type == kQ8) to[2 + i] = static_cast<char>(n);
            else to[2 + i % 16] = static_cast<char>(to[2 + i % 16] | (n + 8) << (i < 16 ? 0 : 4));
            x[i] = scale * static_cast<float>(n);
        }
    }
}

// align: 16, 4 or 2: addresses are multiples of it and of nothing larger.
inline RowStore make_rows(RowType type, int d, const CaseSpec &spec, float mean, int align, std::mt19937 &random) {
    std::normal_distribution<float> normal(0.0f, 1.0f);
    RowStore r;
    const int heads = spec.n_kv_head, n_pages = (spec.n_cells + spec.page_cells - 1) / spec.page_cells;
    r.head_stride = static_cast<long long>(row_bytes(type, d));
    r.cell_stride = r.head_stride * heads + (is_blocked(type) ? align : 16);
    r.values.resize(static_cast<size_t>(spec.n_cells) * heads * d);
    const size_t shift = is_blocked(type) ? static_cast<size_t>(align) : 16;
    for (int page = 0; page < n_pages; page++) {
        r.pages.emplace_back(spec.page_cells * r.cell_stride + 32, static_cast<char>(0xFF));
        char *start = r.pages.back().data();
        r.table.push_back(start + (32 - reinterpret_cast<uintptr_t>(start) % 16) % 16 + (shift < 16 ? shift : 0));
    }
    for (int cell = 0; cell < spec.n_cells; cell++)
        for (int head = 0; head < heads; head++) {
            float *x = &r.values[(static_cast<size_t>(cell) * heads + head) * d];
            for (int i = 0; i < d; i++) x[i] = mean + normal(random);
            write_row(type, x, d,
                      const_cast<char *>(r.table[cell / spec.page_cells]) + cell % spec.page_cells * r.cell_stride +
                          head * r.head_stride);
        }
    return r;
}

struct Case {
    CaseSpec spec;
    int d_k, d_v;
    float scale;
    RowStore k, v;
    std::vector<float> q, sinks;
    std::vector<int> cell_pos, cell_seq, query_pos, query_seq;
    std::vector<unsigned short> dense;
    int window = 0;

    bool sees(int query, int cell) const {
        if (!dense.empty()) return f16_to_f32(dense[static_cast<size_t>(query) * spec.n_cells + cell]) > -65504.0f;
        if (cell_pos.empty()) return true;
        const int pos = cell_pos[cell];
        return pos >= 0 && pos <= query_pos[query] && (window == 0 || query_pos[query] - pos < window) &&
               (cell_seq.empty() || cell_seq[cell] == query_seq[query]);
    }
    double score(int query, int head, int cell) const {
        const int kv = head / (spec.n_head / spec.n_kv_head);
        const float *a = &q[(static_cast<size_t>(query) * spec.n_head + head) * d_k];
        const float *b = &k.values[(static_cast<size_t>(cell) * spec.n_kv_head + kv) * d_k];
        double s = 0.0;
        for (int i = 0; i < d_k; i++) s += static_cast<double>(a[i]) * b[i];
        s *= scale;
        if (spec.softcap > 0.0f) s = spec.softcap * std::tanh(s / spec.softcap);
        if (!dense.empty()) s += f16_to_f32(dense[static_cast<size_t>(query) * spec.n_cells + cell]);
        return s;
    }
    std::vector<double> answer() const { // [n_q][n_head][d_v]
        std::vector<double> out(static_cast<size_t>(spec.n_q) * spec.n_head * d_v, 0.0);
        for (int query = 0; query < spec.n_q; query++)
            for (int head = 0; head < spec.n_head; head++) {
                double m = sinks.empty() ? -INFINITY : sinks[head];
                for (int c = 0; c < spec.n_cells; c++)
                    if (sees(query, c)) m = std::max(m, score(query, head, c));
                double l = sinks.empty() ? 0.0 : std::exp(sinks[head] - m);
                double *o = &out[(static_cast<size_t>(query) * spec.n_head + head) * d_v];
                const int kv = head / (spec.n_head / spec.n_kv_head);
                for (int c = 0; c < spec.n_cells; c++) {
                    if (!sees(query, c)) continue;
                    const double w = std::exp(score(query, head, c) - m);
                    l += w;
                    for (int d = 0; d < d_v; d++)
                        o[d] += w * v.values[(static_cast<size_t>(c) * spec.n_kv_head + kv) * d_v + d];
                }
                for (int d = 0; d < d_v && l > 0.0; d++) o[d] /= l;
            }
        return out;
    }
};

// Value 0 of every query is 8, of every key 0; only cell 0 has the logit there, and nothing else.
inline void make_sink(Case &c, RowType k_type, RowType v_type) {
    for (size_t i = 0; i < c.q.size(); i += static_cast<size_t>(c.d_k)) c.q[i] = 8.0f;
    const auto rewrite = [&](RowStore &r, RowType type, int d, auto change) {
        for (int cell = 0; cell < c.spec.n_cells; cell++)
            for (int head = 0; head < c.spec.n_kv_head; head++) {
                float *x = &r.values[(static_cast<size_t>(cell) * c.spec.n_kv_head + head) * d];
                change(cell, x);
                write_row(type, x, d,
                          const_cast<char *>(r.table[cell / c.spec.page_cells]) +
                              cell % c.spec.page_cells * r.cell_stride + head * r.head_stride);
            }
    };
    rewrite(c.k, k_type, c.d_k, [&](int cell, float *x) {
        if (cell == 0) std::fill(x, x + c.d_k, 0.0f);
        x[0] = cell == 0 ? c.spec.sink_nats / c.scale / 8.0f : 0.0f;
    });
    rewrite(c.v, v_type, c.d_v, [&](int cell, float *x) {
        for (int i = 0; i < c.d_v && cell == 0; i++) x[i] *= 0.05f;
    });
}

inline Case make_case(const CaseSpec &spec, int d_k, int d_v, RowType k_type, RowType v_type, int align,
                      unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    Case c{spec, d_k, d_v, 1.0f / std::sqrt(static_cast<float>(d_k)), {}, {}, {}, {}, {}, {}, {}, {}, {}};
    c.k = make_rows(k_type, d_k, spec, 0.0f, align, random);
    c.v = make_rows(v_type, d_v, spec, 0.3f, align, random);
    for (int i = 0; i < spec.n_q * spec.n_head * d_k; i++)
        c.q.push_back(normal(random) * (spec.peaked ? 300.0f : 1.0f));
    if (spec.sink_nats > 0.0f) make_sink(c, k_type, v_type);
    for (int h = 0; spec.sinks && h < spec.n_head; h++) c.sinks.push_back(h % 2 ? 40.0f : normal(random));
    if (spec.mask == MaskKind::dense) {
        c.dense.resize(static_cast<size_t>(spec.n_q) * spec.n_cells);
        for (auto &bias : c.dense)
            bias = random() % 3 == 0 ? f32_to_f16(-INFINITY) : f32_to_f16(-0.25f * (random() % 4));
    } else if (spec.mask != MaskKind::none) { // cells out of order of position, every seventh empty; or solid
        const bool solid = spec.mask >= MaskKind::solid;
        for (int i = 0; i < spec.n_cells; i++) c.cell_pos.push_back(!solid && i % 7 == 3 ? -1 : i);
        const int stir = solid ? 0 : spec.n_cells / 3;
        for (int i = 0; i + 1 < stir; i++) std::swap(c.cell_pos[i], c.cell_pos[random() % stir]);
        for (int i = 0; i < spec.n_q; i++)
            c.query_pos.push_back(solid ? spec.n_cells * 2 / 3 + 10 * i : spec.n_cells - spec.n_q + i - (i == 1 ? 30 : 0));
        for (int i = 0; i < spec.n_cells; i++) // what an empty cell holds is nobody's business
            for (const RowStore *r : {&c.k, &c.v})
                if (c.cell_pos[i] < 0)
                    std::memset(const_cast<char *>(r->table[i / spec.page_cells]) +
                                    i % spec.page_cells * r->cell_stride,
                                0xFF, static_cast<size_t>(r->head_stride) * spec.n_kv_head);
        if (spec.mask == MaskKind::window) c.window = 37;
        if (spec.mask == MaskKind::solid_window) c.window = 100;
        if (spec.mask == MaskKind::hidden)
            for (int &pos : c.query_pos) pos = -1;
        if (spec.mask == MaskKind::sequences || spec.mask == MaskKind::solid_sequences) {
            for (int i = 0; i < spec.n_cells; i++) c.cell_seq.push_back(i / 40 % 3);
            for (int i = 0; i < spec.n_q; i++) c.query_seq.push_back((i + 1) % 3);
        }
    }
    return c;
}

} // namespace paged_attn::gpu::test
