// Runs an instance's kernels on a case in the emulation, and compares with f64.
#pragma once
#include "attention_case.h"
#include "cuda/host/divisor.h"
#include "cuda/kernels.cuh"
#include "emulate/launch.h"

namespace paged_attn::gpu::test {

enum class Kernel { decode, narrow, wide };

struct Outcome {
    double error = 0.0; // relative L2
    emulate::Findings findings;
};

struct Test {
    std::string name;
    Outcome (*run)(const CaseSpec &spec, Kernel kernel, const emulate::Mutant &mutant, unsigned seed);
    Kernel kernel;
    CaseSpec spec;
};
std::vector<Test> &tests(); // filled by the instance files before main

template <class X> emulate::Buffer buffer_of(const X &x) {
    const auto *p = reinterpret_cast<const char *>(x.data());
    return {p, p + x.size() * sizeof(x[0])};
}

template <class I> Problem make_problem(const Case &c, int first_cell, int n_cells) {
    Problem p = {};
    const auto rows = [&](const RowStore &r) {
        return Rows{r.table.data() + first_cell / c.spec.page_cells,
                    make_divisor(static_cast<unsigned>(c.spec.page_cells)), r.cell_stride, r.head_stride};
    };
    p.n_q = c.spec.n_q;
    p.n_cells = n_cells;
    p.n_head = c.spec.n_head;
    p.group = c.spec.n_head / c.spec.n_kv_head;
    p.score_scale = c.spec.softcap > 0.0f ? c.scale / c.spec.softcap : c.scale * kLog2E;
    p.cap_log2 = c.spec.softcap * kLog2E;
    p.q = c.q.data();
    p.q_head_stride = I::kDK * 4;
    p.q_stride = p.q_head_stride * p.n_head;
    p.k = rows(c.k);
    p.v = rows(c.v);
    if (!c.dense.empty()) p.mask.dense = c.dense.data() + first_cell;
    p.mask.dense_stride = 2LL * c.spec.n_cells;
    if (!c.cell_pos.empty()) p.mask.cell_pos = c.cell_pos.data() + first_cell;
    if (!c.cell_seq.empty()) p.mask.cell_seq = c.cell_seq.data() + first_cell;
    p.mask.query_pos = c.query_pos.data();
    p.mask.query_seq = c.query_seq.data();
    p.mask.window = c.window;
    return p;
}

template <class I>
Outcome run_emulated(const CaseSpec &spec, Kernel kernel, const emulate::Mutant &mutant, unsigned seed) {
    const Case c = make_case(spec, I::kDK, I::kDV, I::kK, I::kV, I::kAlign, seed);
    const ImageInfo info = Kernels<I>::kInfo;
    const int n_rows = spec.n_q * spec.n_head, group = spec.n_head / spec.n_kv_head;
    const long long stride = (static_cast<long long>(n_rows) * (I::kDV + 2) + 3) / 4 * 4;
    const int n_slots = spec.n_splits;
    std::vector<Float4> slots(static_cast<size_t>(stride * n_slots / 4), Float4{NAN, NAN, NAN, NAN});
    std::vector<Float4> out(static_cast<size_t>(n_rows) * I::kDV / 4, Float4{NAN, NAN, NAN, NAN});
    std::vector<CellBounds> bounds(static_cast<size_t>(spec.n_cells / kBoundsCells + 1));

    Outcome outcome;
    emulate::Launch l = {};
    l.mutant = mutant;
    l.arch = I::kArch;
    l.seed = seed;
    l.buffers = {buffer_of(slots),       buffer_of(out),         buffer_of(bounds),     buffer_of(c.q),
                 buffer_of(c.k.table),   buffer_of(c.v.table),   buffer_of(c.cell_pos), buffer_of(c.cell_seq),
                 buffer_of(c.query_pos), buffer_of(c.query_seq), buffer_of(c.dense),    buffer_of(c.sinks)};
    for (const RowStore *r : {&c.k, &c.v})
        for (const auto &page : r->pages) l.buffers.push_back(buffer_of(page));

    const int n_pages = (spec.n_cells + spec.page_cells - 1) / spec.page_cells;
    for (int chunk = 0; chunk < spec.n_chunks; chunk++) {
        const int first = n_pages * chunk / spec.n_chunks * spec.page_cells;
        const int last = std::min(spec.n_cells, n_pages * (chunk + 1) / spec.n_chunks * spec.page_cells);
        Problem p = make_problem<I>(c, first, last - first);
        p.slots = {reinterpret_cast<float *>(slots.data()), stride};
        p.n_splits = spec.n_splits;
        p.accumulate = chunk > 0;
        if (p.mask.cell_pos) {
            l.grid_x = p.n_cells / (kBoundsCells * 128) + 1;
            l.grid_y = l.grid_z = 1;
            l.n_threads = 128;
            emulate::launch(l, outcome.findings, [&] { find_bounds(p.mask, p.n_cells, 128, bounds.data()); });
            p.mask.bounds = bounds.data();
        }
        const int rows = kernel == Kernel::decode   ? info.decode_rows
                         : kernel == Kernel::narrow ? info.narrow_rows
                                                    : info.wide_rows;
        l.grid_x = spec.n_splits;
        l.grid_y = spec.n_kv_head;
        l.grid_z = (spec.n_q * group + rows - 1) / rows;
        if (kernel == Kernel::decode) {
            l.n_threads = info.decode_threads;
            l.shared_bytes = static_cast<size_t>(info.decode_shared);
            emulate::launch(l, outcome.findings, [&] { decode<I>(p); });
        } else if (kernel == Kernel::narrow) {
            l.n_threads = info.narrow_threads;
            l.shared_bytes = static_cast<size_t>(info.narrow_shared);
            emulate::launch(l, outcome.findings, [&] { narrow<I>(p); });
        } else {
            l.n_threads = info.wide_threads;
            l.shared_bytes = static_cast<size_t>(info.wide_shared);
            emulate::launch(l, outcome.findings, [&] { wide<I>(p); });
        }
    }
    const Combination combination = {{reinterpret_cast<float *>(slots.data()), stride},
                                     n_slots,
                                     n_rows,
                                     spec.n_head,
                                     c.sinks.empty() ? nullptr : c.sinks.data(),
                                     reinterpret_cast<float *>(out.data())};
    l.grid_x = n_rows;
    l.grid_y = l.grid_z = 1;
    l.n_threads = info.combine_threads;
    l.shared_bytes = static_cast<size_t>(info.combine_shared);
    emulate::launch(l, outcome.findings, [&] { combine<I>(combination); });

    const std::vector<double> wanted = c.answer();
    const auto *got = reinterpret_cast<const float *>(out.data());
    double difference = 0.0, size = 0.0;
    for (size_t i = 0; i < wanted.size(); i++) {
        difference += (got[i] - wanted[i]) * (got[i] - wanted[i]);
        size += wanted[i] * wanted[i];
    }
    outcome.error = size > 0.0 ? std::sqrt(difference / size) : std::sqrt(difference);
    return outcome;
}

// Registers a test of one instance.
struct Add {
    template <class I> static bool instance(const char *name, Kernel kernel, std::vector<CaseSpec> specs) {
        for (const CaseSpec &spec : specs) tests().push_back({name, &run_emulated<I>, kernel, spec});
        return true;
    }
};

} // namespace paged_attn::gpu::test
