// Every place where threads meet or data must have landed, by name.
//
// On a GPU the names vanish. The host emulation can leave out one of them (a mutant), which its checks must notice:
// a place that may be left out without being noticed is either not tested or not needed.
#pragma once

namespace paged_attn::gpu {

enum class At : int {
    none = 0,
    decode_query_ready,
    decode_pieces_landed,
    decode_scores_ready,
    decode_weights_ready,
    decode_sums_free,
    decode_sums_ready,
    mma_tile_landed,
    mma_tile_ready,
    mma_ring_drained,
    mma_states_ready,
    fma_keys_free,
    fma_keys_ready,
    fma_scores_ready,
    fma_values_ready,
    combine_max_ready,
    combine_sums_ready,
    count
};

} // namespace paged_attn::gpu
