#pragma once

// The cells of llama.cpp's K/V cache: which holds what, where it would put more, and the tensors that the rows lie in. All of
// it through public members of the vendored llama.cpp. Nothing here throws. The caller serialises everything with
// llama_decode and the llama_memory functions.

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct llama_context;
struct ggml_tensor;
struct ggml_backend_device;

// What the K/V of a context depends on, beside model and tokens.
struct kvtier_context {
    int32_t children;    // caches: one, or a full one and one of sliding windows
    int32_t streams;     // one for each sequence, or one for all
    int32_t cells;       // of a stream
    bool    flash_attention;
    bool    exact_shift; // a shift of some rows leaves the bits of all others as they are
    int32_t threads;     // that compute a prompt
    char    rope[256];   // as resolved, exact to the bit
};

// K and V of one layer. A sequence's rows lie in one stream; streams follow each other in the tensors.
struct kvtier_layer {
    int32_t child, layer;
    int32_t window;       // how many positions attention looks back over, its own included; 0: all
    bool    chunked;      // … or from the last multiple of window on
    int32_t kv_heads, k_dim, v_dim;
    bool    v_transposed; // [stream][element][cell] instead of [stream][cell][element]
    size_t  k_row_bytes, v_row_bytes;       // of a position
    size_t  k_stream_bytes, v_stream_bytes; // from one stream to the next
    struct ggml_tensor * k;
    struct ggml_tensor * v;
    struct ggml_backend_device * device; // that computes the layer
};

// kvtier_describe fills in info and returns NULL, or returns why the rows of this context can't be tiered.
const char * kvtier_describe(struct llama_context * ctx, struct kvtier_context * info);

// kvtier_layers lists the layers of the first cache, then those of the second. Returns their number, -1 if there are more than
// max or one is not as expected.
int kvtier_layers(struct llama_context * ctx, struct kvtier_layer * layers, int max);

// kvtier_cells lists the cells of a sequence in ascending order, and the position in each. Returns their number, -1 if there
// are more than max.
int kvtier_cells(struct llama_context * ctx, int child, int32_t seq, int32_t * cells, int32_t * positions, int max);

// kvtier_find returns in cells where llama.cpp itself would put n more positions of a sequence, from from on.
bool kvtier_find(struct llama_context * ctx, int child, int32_t seq, int32_t from, int n, int32_t * cells);

// kvtier_occupy gives the cells that kvtier_find names to the positions; false, and nothing is changed, if those are others now.
bool kvtier_occupy(struct llama_context * ctx, int child, int32_t seq, int32_t from, int n, const int32_t * cells);

#ifdef __cplusplus
}
#endif
