// Into how many splits the cells of a run are cut: as few waves of blocks as the GPU can be kept busy with.
//
// A block is resident until it ends, so a grid of 168 blocks on 82 places takes three turns of which the last is empty.
// Time in units of what a block needs for 64 cells: turns * (units of the longest split + start and end of a block), and
// each state more is written, read and added once. The same thought: FlashInfer's and llama.cpp's split schedulers.
#pragma once

namespace paged_attn::gpu {

struct SplitCosts {
    double block = 1.0;  // query, the first copies, the state at the end: about one unit
    double state = 0.05; // of the combination, for each split
};

struct SplitTask {
    int n_units;          // of 64 cells
    int blocks_per_split; // K/V heads x row tiles
    int at_once;          // blocks that the GPU holds
    int least, most;      // splits that are allowed; 1 <= least
};

constexpr double split_time(const SplitTask &t, int n_splits, const SplitCosts &costs = {}) {
    const long long blocks = static_cast<long long>(n_splits) * t.blocks_per_split;
    const long long turns = (blocks + t.at_once - 1) / t.at_once;
    const int longest = (t.n_units + n_splits - 1) / n_splits;
    return static_cast<double>(turns) * (longest + costs.block) + costs.state * n_splits;
}

// The number of splits of least time, the smaller of two equals; `least` where `most` is smaller.
constexpr int best_splits(const SplitTask &t) {
    int best = t.least;
    for (int n = t.least + 1; n <= t.most && n <= t.n_units; n++)
        if (split_time(t, n) < split_time(t, best)) best = n;
    return best;
}

} // namespace paged_attn::gpu
