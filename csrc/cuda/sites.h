// Every place where threads meet or data must have landed, by name.
//
// On a GPU the names vanish. The host emulation can leave out one of them (a mutant), which its checks must notice:
// a place that may be left out without being noticed is either not tested or not needed.
#pragma once

namespace paged_attn::gpu {

#define PA_SITES(X) \
    X(decode_query_ready) \
    X(decode_pieces_landed) \
    X(decode_scores_ready) \
    X(decode_weights_ready) \
    X(decode_sums_free) \
    X(decode_sums_ready) \
    X(mma_tile_landed) \
    X(mma_tile_ready) \
    X(mma_ring_drained) \
    X(mma_states_ready) \
    X(fma_keys_free) \
    X(fma_keys_ready) \
    X(fma_scores_ready) \
    X(fma_values_ready) \
    X(combine_max_ready) \
    X(combine_sums_ready)

#define PA_SITE(name) name,
enum class At : int { none = 0, PA_SITES(PA_SITE) count };
#undef PA_SITE

#if defined(PA_EMULATE)
inline const char *site_name(At at) {
#define PA_SITE(name) #name,
    static const char *const kNames[] = {"none", PA_SITES(PA_SITE)};
#undef PA_SITE
    return kNames[static_cast<int>(at)];
}
#endif

} // namespace paged_attn::gpu
