// A launch: all blocks of a grid, one after another in random order.
#pragma once
#include "block.h"

namespace paged_attn::gpu::emulate {

struct Launch {
    int grid_x, grid_y, grid_z, n_threads;
    size_t shared_bytes;
    std::vector<Buffer> buffers;
    Mutant mutant = {};
    int arch = 0; // compute capability x 10, of the tensor cores
    unsigned seed = 1;
};

inline void launch(const Launch &l, Findings &findings, const std::function<void()> &kernel) {
    std::vector<int> blocks(static_cast<size_t>(l.grid_x) * l.grid_y * l.grid_z);
    for (size_t i = 0; i < blocks.size(); i++) blocks[i] = static_cast<int>(i);
    std::mt19937 random(l.seed);
    std::shuffle(blocks.begin(), blocks.end(), random);
    for (const int i : blocks) {
        Block block(l.n_threads, i % l.grid_x, i / l.grid_x % l.grid_y, i / l.grid_x / l.grid_y,
                    l.shared_bytes - std::min(l.shared_bytes, static_cast<size_t>(l.mutant.shared_bytes_less)), l.buffers,
                    l.mutant, tensor_core_of(l.arch), l.seed * 7919 + static_cast<unsigned>(i), findings);
        if (!block.run(kernel)) return;
    }
}

} // namespace paged_attn::gpu::emulate
