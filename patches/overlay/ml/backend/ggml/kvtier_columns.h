// Some cells of a tensor that has each element's cells one behind the other ([element][cell], as V lies without flash attention),
// where a device has it. Of a block's rows each element is a run of some bytes then, a thousand of them a layer: to move each by a
// call takes longer than to compute the rows. So the device itself copies them between the tensor and a staging buffer that has
// no gaps: GGML's own operation, by a queue of our own, because a graph among those of a model would make CUDA give up its graphs.
//
// What a device's copy does to the bits is tried once, with all that an element can be. Nothing here is for several threads, and
// the device must have computed what lies in the tensor. C and C++: the Go engines and llama-server have this one file.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef KVT_STAGING_BYTES // tests have less
#define KVT_STAGING_BYTES ((size_t) 1 << 20)
#define KVT_SPAN_BYTES ((size_t) 64 << 20) // of the tensor in one copy: some devices bind no more than 128 MiB at a time
#endif
#define KVT_DEVICES 16

// The same cells of each element: where the first element's lie, and from one element to the next.
struct kvt_columns {
    size_t first_byte, column_bytes, elements, cells;
};

struct kvt_column_device {
    ggml_backend_dev_t device;
    enum ggml_type type; // of the elements
    ggml_backend_t queue;
    ggml_backend_buffer_t staging;
};

static inline bool kvt_copy_columns(const struct kvt_column_device * by, struct ggml_tensor * of, struct kvt_columns part, char * host, bool write) {
    struct ggml_init_params parameters = { 8*ggml_tensor_overhead() + ggml_graph_overhead_custom(8, false), NULL, true };
    struct ggml_context * context = ggml_init(parameters);
    if (context == NULL) {
        return false;
    }
    // Of three dimensions: where a row has one element, CUDA and Vulkan take [1][elements] for a transposed matrix, and CUDA writes it
    // without gaps, over others.
    const size_t size = ggml_type_size(of->type);
    const int64_t cells = (int64_t) part.cells, elements = (int64_t) part.elements;
    struct ggml_tensor * staged = ggml_new_tensor_1d(context, of->type, cells*elements);
    struct ggml_tensor * packed = ggml_view_3d(context, staged, cells, 1, elements, (part.cells + 1)*size, part.cells*size, 0);
    struct ggml_tensor * view = ggml_view_3d(context, of, cells, 1, elements, part.column_bytes, part.column_bytes, part.first_byte);
    struct ggml_tensor * copy = write ? ggml_cpy(context, packed, view) : ggml_cpy(context, view, packed);
    bool done = ggml_backend_tensor_alloc(by->staging, staged, ggml_backend_buffer_get_base(by->staging)) == GGML_STATUS_SUCCESS &&
                ggml_backend_view_init(packed) == GGML_STATUS_SUCCESS && ggml_backend_view_init(view) == GGML_STATUS_SUCCESS &&
                ggml_backend_view_init(copy) == GGML_STATUS_SUCCESS && ggml_backend_supports_op(by->queue, copy);
    if (done) {
        struct ggml_cgraph * graph = ggml_new_graph_custom(context, 8, false);
        ggml_build_forward_expand(graph, copy);
        if (write) {
            ggml_backend_tensor_set(staged, host, 0, ggml_nbytes(staged));
        }
        done = ggml_backend_graph_compute(by->queue, graph) == GGML_STATUS_SUCCESS;
        if (done && !write) {
            ggml_backend_tensor_get(staged, host, 0, ggml_nbytes(staged));
        }
    }
    ggml_free(context);
    return done;
}

static inline bool kvt_move_columns(const struct kvt_column_device * by, struct ggml_tensor * of, struct kvt_columns all, char * host, bool write) {
    const size_t bytes = all.cells*ggml_type_size(of->type);
    if (bytes == 0 || bytes > KVT_STAGING_BYTES || bytes > all.column_bytes) {
        return bytes == 0;
    }
    size_t most = KVT_STAGING_BYTES/bytes;
    if (most > KVT_SPAN_BYTES/all.column_bytes) {
        most = KVT_SPAN_BYTES/all.column_bytes > 0 ? KVT_SPAN_BYTES/all.column_bytes : 1;
    }
    for (size_t at = 0; at < all.elements; at += most) {
        struct kvt_columns part = { all.first_byte + at*all.column_bytes, all.column_bytes, all.elements - at, all.cells };
        if (part.elements > most) {
            part.elements = most;
        }
        if (!kvt_copy_columns(by, of, part, host + at*bytes, write)) {
            return false;
        }
    }
    return true;
}

// All that an element of two bytes can be but what is no number, which a device may write as another one; as many of four bytes.
static inline void kvt_fill_patterns(enum ggml_type type, char * to, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        if (ggml_type_size(type) == 2) {
            uint16_t bits = (uint16_t) i;
            const uint16_t exponent = type == GGML_TYPE_BF16 ? 0x7f80 : 0x7c00;
            if ((bits & exponent) == exponent) {
                bits &= (uint16_t) (0x8000 | exponent); // infinite
            }
            memcpy(to + 2*i, &bits, 2);
        } else {
            uint32_t bits = (uint32_t) i*2654435761u;
            if ((bits & 0x7f800000u) == 0x7f800000u) {
                bits = (uint32_t) i;
            }
            memcpy(to + 4*i, &bits, 4);
        }
    }
}

// Whether a copy into so many cells and back gives the same bits, and leaves all other cells alone.
static inline bool kvt_columns_are_exact(const struct kvt_column_device * by, ggml_backend_buffer_type_t memory, enum ggml_type type, size_t count) {
    enum { cells = 300, elements = 256, first = 19, filler = 0xa5 };
    const size_t size = ggml_type_size(type), whole = (size_t) cells*elements*size, part = count*elements*size;
    struct ggml_init_params parameters = { 2*ggml_tensor_overhead(), NULL, true };
    struct ggml_context * context = ggml_init(parameters);
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(memory, whole + 4096);
    char * bytes = (char *) malloc(2*part + 2*whole);
    bool exact = context != NULL && buffer != NULL && bytes != NULL;
    if (exact) {
        char * const wanted = bytes, * const got = bytes + part, * const tensor = got + part, * const expected = tensor + whole;
        struct ggml_tensor * of = ggml_new_tensor_2d(context, type, cells, elements);
        const struct kvt_columns columns = { first*size, cells*size, elements, count };
        kvt_fill_patterns(type, wanted, count*elements);
        memset(expected, filler, whole);
        exact = ggml_backend_tensor_alloc(buffer, of, ggml_backend_buffer_get_base(buffer)) == GGML_STATUS_SUCCESS;
        if (exact) {
            ggml_backend_tensor_set(of, expected, 0, whole);
            for (size_t element = 0; element < elements; ++element) {
                memcpy(expected + (element*cells + first)*size, wanted + element*count*size, count*size);
            }
            exact = kvt_move_columns(by, of, columns, wanted, true) && kvt_move_columns(by, of, columns, got, false);
            ggml_backend_tensor_get(of, tensor, 0, whole);
            exact = exact && memcmp(got, wanted, part) == 0 && memcmp(tensor, expected, whole) == 0;
        }
    }
    free(bytes);
    ggml_backend_buffer_free(buffer); // NULL is nothing
    if (context != NULL) {
        ggml_free(context);
    }
    return exact;
}

// The device that has this tensor; NULL if it cannot copy exactly. Kept as long as the process lives.
static inline const struct kvt_column_device * kvt_device_of_columns(struct ggml_tensor * tensor) {
    static struct kvt_column_device devices[KVT_DEVICES];
    static size_t count = 0;
    ggml_backend_buffer_type_t memory = tensor->buffer != NULL ? ggml_backend_buffer_get_type(tensor->buffer) : NULL;
    ggml_backend_dev_t device = memory != NULL ? ggml_backend_buft_get_device(memory) : NULL;
    if (device == NULL || ggml_blck_size(tensor->type) != 1) {
        return NULL;
    }
    for (size_t i = 0; i < count; ++i) {
        if (devices[i].device == device && devices[i].type == tensor->type) {
            return devices[i].queue != NULL ? &devices[i] : NULL;
        }
    }
    if (count == KVT_DEVICES) {
        return NULL;
    }
    struct kvt_column_device * found = &devices[count++];
    found->device = device;
    found->type = tensor->type;
    found->queue = ggml_backend_dev_init(device, NULL);
    found->staging = found->queue != NULL ? ggml_backend_buft_alloc_buffer(memory, KVT_STAGING_BYTES) : NULL;
    if (found->staging == NULL || !kvt_columns_are_exact(found, memory, tensor->type, 256) || !kvt_columns_are_exact(found, memory, tensor->type, 1)) {
        ggml_backend_buffer_free(found->staging);
        ggml_backend_free(found->queue);
        found->staging = NULL;
        found->queue = NULL;
    }
    return found->queue != NULL ? found : NULL;
}

// Out of the tensor, or into it: each element's cells one behind the other, without gaps. False if the device could not.
static inline bool kvt_get_columns(struct ggml_tensor * from, struct kvt_columns which, char * to) {
    const struct kvt_column_device * by = kvt_device_of_columns(from);
    return by != NULL && kvt_move_columns(by, from, which, to, false);
}

static inline bool kvt_set_columns(struct ggml_tensor * to, struct kvt_columns which, const char * from) {
    const struct kvt_column_device * by = kvt_device_of_columns(to);
    return by != NULL && kvt_move_columns(by, to, which, (char *) (uintptr_t) from, true);
}
