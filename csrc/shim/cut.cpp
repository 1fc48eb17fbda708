// How an operation's cells are cut for csrc's kernels. The sums of a row depend on it, so it follows from the operation and
// the GPU alone: never from where K/V lie, from num_ctx, or from how large a batch may be.
//
//   split  cells that one block sums, 4096 at the most: then tensor cores that round towards zero stay within the bound on
//          the error, on every GPU and for heads of every size (docs/attention/kernels-cuda.md, kMostCells of kernels.cuh)
//   round  as many splits as there are states; those of the next round join them, one after the other
//   piece  some consecutive splits of a round, which a launch attends by itself; changes no sum, so it may follow from
//          where K/V lie
#include "exact.h"

#include "../cuda/problem.h"

#include <algorithm>

namespace shim {

namespace {

using namespace paged_attn::gpu;

constexpr int kSplitMost = 4096; // cells
constexpr size_t kSlotBytes = 32 << 20; // of a piece, if a split is not more
static_assert(kSplitMost % kSplitCells == 0, "what a split has at most is a whole number of units");

int divide_up(int a, int b) { return (a + b - 1) / b; }

long long floats_of(const pa_shape &s, int n_q) { // the state of n_q queries, as a plan lays it out
    return (static_cast<long long>(n_q) * s.n_head * (s.d_v + 2) + 3) / 4 * 4;
}

// States of n_q queries that every plan holds: as many as the memory for kStates of kQueries, and no fewer than these.
int states_of(const pa_shape &s, int n_q) {
    return static_cast<int>(kStates * floats_of(s, std::max(n_q, kQueries)) / floats_of(s, n_q));
}

} // namespace

size_t plan_bytes(const pa_shape &s) {
    return static_cast<size_t>(kStates * floats_of(s, s.max_q)) * sizeof(float) +
           static_cast<size_t>(divide_up(s.max_cells, kBoundsCells)) * sizeof(CellBounds);
}

pa_status limit_splits(pa_cuda_plan *plan) { return pa_cuda_split_cells(plan, kSplitMost); }

Cut cut_of(const pa_cuda_plan *plan, const pa_shape &shape, int n_q, int n_cells) {
    const int states = states_of(shape, n_q);
    Cut cut;
    cut.n_units = divide_up(n_cells, kSplitCells);
    cut.n_rounds = std::max(1, divide_up(divide_up(n_cells, kSplitMost), states));
    cut.n_splits = pa_cuda_splits(plan, n_q, std::min(n_cells, divide_up(cut.n_units, cut.n_rounds) * kSplitCells), states);
    return cut;
}

// As even as units of cells allow, the longer ones first; as the kernels cut a round (split_range of csrc/cuda/visible.cuh).
int Cut::first_unit(int round) const { return round * (n_units / n_rounds) + std::min(round, n_units % n_rounds); }

int Cut::first_cell(int round, int split) const {
    const int first = first_unit(round), units = first_unit(round + 1) - first;
    return (first + split * (units / n_splits) + std::min(split, units % n_splits)) * paged_attn::gpu::kSplitCells;
}

size_t slot_cells(size_t cell_bytes) {
    return std::max<size_t>(kSlotBytes / cell_bytes, kSplitMost);
}

// As few as there may be: a launch each, and for what is copied a slot each.
std::vector<Piece> pieces_of(const Cut &cut, size_t n_cells, const Reach &reach) {
    std::vector<Piece> pieces;
    for (int round = 0; round < cut.n_rounds; round++) {
        for (int split = 0; split < cut.n_splits; split++) {
            const auto cell = [&](int at) { return std::min(n_cells, static_cast<size_t>(cut.first_cell(round, at))); };
            const size_t first = cell(split), end = cell(split + 1);
            const From from = end <= reach.on_device ? From::device : end <= reach.settled ? From::ahead : From::after;
            Piece *last = split > 0 ? &pieces.back() : nullptr;
            if (last && last->from == from && (from == From::device || end - last->first_cell <= reach.slot)) {
                last->n_splits++;
                last->end_cell = end;
            } else {
                pieces.push_back({from, round, split, 1, first, end});
            }
        }
    }
    return pieces;
}

} // namespace shim
