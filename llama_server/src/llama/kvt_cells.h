// Which cells of a cache hold the rows of one sequence.
#pragma once

#include <cstdint>
#include <vector>

class llama_kv_cache;

namespace kvt {

struct cell {
    uint32_t index = 0;
    int32_t position = 0;
    int32_t y = 0; // with M-RoPE
    int32_t x = 0;
};

// In the order of the cells. Empty if the cache shares the cells of another one.
std::vector<cell> held_cells(const llama_kv_cache & cache, int32_t seq);

// Whether a cell holds nothing, among those that the sequence uses.
bool cell_is_free(const llama_kv_cache & cache, int32_t seq, uint32_t index);

} // namespace kvt
