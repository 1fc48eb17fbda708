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
#define KVT_FREE_BYTES ((size_t) 64 << 20) // of the device's memory; what a queue and its kernels take is not asked for but taken
#define KVT_COPIES 256 // in one graph
#define KVT_DEVICES 16

// Cells that follow one another, of each element: where those of the first element begin, and how many there are.
struct kvt_run {
    size_t first_byte, cells;
};

// What the runs of a tensor have alike.
struct kvt_columns {
    size_t column_bytes, elements; // from one element to the next
};

struct kvt_column_device {
    ggml_backend_dev_t device;
    enum ggml_type type; // of the elements
    ggml_backend_t queue;
    ggml_backend_buffer_t staging;
};

// Adds to the graph a copy of a run's elements, to or from this place in the staging buffer. NULL if the device cannot do it.
static inline struct ggml_tensor * kvt_add_copy(struct ggml_context * context, const struct kvt_column_device * by, struct ggml_tensor * of,
                                                struct ggml_tensor * staged, struct kvt_columns columns, struct kvt_run run, size_t place, bool write) {
    // Of three dimensions: where a row has one element, CUDA and Vulkan take [1][elements] for a transposed matrix, and CUDA writes it
    // without gaps, over others.
    const size_t size = ggml_type_size(of->type);
    const int64_t cells = (int64_t) run.cells, elements = (int64_t) columns.elements;
    struct ggml_tensor * packed = ggml_view_3d(context, staged, cells, 1, elements, (run.cells + 1)*size, run.cells*size, place);
    struct ggml_tensor * view = ggml_view_3d(context, of, cells, 1, elements, columns.column_bytes, columns.column_bytes, run.first_byte);
    struct ggml_tensor * copy = write ? ggml_cpy(context, packed, view) : ggml_cpy(context, view, packed);
    const bool sound = ggml_backend_view_init(packed) == GGML_STATUS_SUCCESS && ggml_backend_view_init(view) == GGML_STATUS_SUCCESS &&
                       ggml_backend_view_init(copy) == GGML_STATUS_SUCCESS && ggml_backend_supports_op(by->queue, copy);
    return sound ? copy : NULL;
}

// Copies as many runs as the staging buffer has room for, in one graph: what takes the time is to wait for the device.
static inline bool kvt_copy_runs(const struct kvt_column_device * by, struct ggml_tensor * of, struct kvt_columns columns, const struct kvt_run * runs,
                                 size_t count, char * host, bool write) {
    const size_t nodes = 4*count + 4, size = ggml_type_size(of->type);
    struct ggml_init_params parameters = { nodes*ggml_tensor_overhead() + ggml_graph_overhead_custom(nodes, false), NULL, true };
    struct ggml_context * context = ggml_init(parameters);
    if (context == NULL) {
        return false;
    }
    size_t total = 0;
    for (size_t i = 0; i < count; ++i) {
        total += runs[i].cells*columns.elements;
    }
    struct ggml_tensor * staged = ggml_new_tensor_1d(context, of->type, (int64_t) total);
    struct ggml_cgraph * graph = ggml_new_graph_custom(context, nodes, false);
    bool done = ggml_backend_tensor_alloc(by->staging, staged, ggml_backend_buffer_get_base(by->staging)) == GGML_STATUS_SUCCESS;
    for (size_t i = 0, place = 0; done && i < count; place += runs[i++].cells*columns.elements*size) {
        struct ggml_tensor * copy = kvt_add_copy(context, by, of, staged, columns, runs[i], place, write);
        done = copy != NULL;
        if (done) {
            ggml_build_forward_expand(graph, copy);
        }
    }
    if (done && write) {
        ggml_backend_tensor_set(staged, host, 0, total*size);
    }
    done = done && ggml_backend_graph_compute(by->queue, graph) == GGML_STATUS_SUCCESS;
    if (done && !write) {
        ggml_backend_tensor_get(staged, host, 0, total*size);
    }
    ggml_free(context);
    return done;
}

// One run that is too much for a graph, some of its elements at a time.
static inline bool kvt_copy_run(const struct kvt_column_device * by, struct ggml_tensor * of, struct kvt_columns columns, struct kvt_run run, char * host,
                                bool write) {
    const size_t bytes = run.cells*ggml_type_size(of->type);
    if (bytes > KVT_STAGING_BYTES || bytes > columns.column_bytes) {
        return false;
    }
    size_t most = KVT_STAGING_BYTES/bytes;
    if (most > KVT_SPAN_BYTES/columns.column_bytes) {
        most = KVT_SPAN_BYTES/columns.column_bytes > 0 ? KVT_SPAN_BYTES/columns.column_bytes : 1;
    }
    for (size_t at = 0; at < columns.elements; at += most) {
        const struct kvt_columns some = { columns.column_bytes, columns.elements - at < most ? columns.elements - at : most };
        const struct kvt_run part = { run.first_byte + at*columns.column_bytes, run.cells };
        if (!kvt_copy_runs(by, of, some, &part, 1, host + at*bytes, write)) {
            return false;
        }
    }
    return true;
}

static inline bool kvt_move_columns(const struct kvt_column_device * by, struct ggml_tensor * of, struct kvt_columns columns, const struct kvt_run * runs,
                                    size_t count, char * host, bool write) {
    const size_t element = columns.elements*ggml_type_size(of->type); // of one cell
    const bool spans = columns.elements*columns.column_bytes <= KVT_SPAN_BYTES;
    for (size_t i = 0; i < count;) {
        size_t some = 0, bytes = 0;
        while (spans && i + some < count && some < KVT_COPIES && bytes + runs[i + some].cells*element <= KVT_STAGING_BYTES) {
            bytes += runs[i + some++].cells*element;
        }
        if (some > 0 ? !kvt_copy_runs(by, of, columns, runs + i, some, host, write) : !kvt_copy_run(by, of, columns, runs[i], host, write)) {
            return false;
        }
        host += some > 0 ? bytes : runs[i].cells*element;
        i += some > 0 ? some : 1;
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

// Whether a copy into runs of so many cells and back gives the same bits, and leaves all other cells alone. Not that there was no
// memory to try it: that is false, too, and `tried` says so.
static inline bool kvt_columns_are_exact(const struct kvt_column_device * by, ggml_backend_buffer_type_t memory, enum ggml_type type, size_t cells,
                                         bool * tried) {
    enum { all = 300, elements = 256, filler = 0xa5 };
    const struct kvt_columns columns = { all*ggml_type_size(type), elements };
    const size_t size = ggml_type_size(type), whole = (size_t) all*elements*size, part = cells*elements*size;
    const struct kvt_run runs[] = { { 19*size, cells }, { (19 + cells + 3)*size, 1 } };
    struct ggml_init_params parameters = { 2*ggml_tensor_overhead(), NULL, true };
    struct ggml_context * context = ggml_init(parameters);
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(memory, whole + 4096);
    const size_t moved = part + elements*size;
    char * bytes = (char *) malloc(2*moved + 2*whole);
    *tried = context != NULL && buffer != NULL && bytes != NULL;
    bool exact = *tried;
    if (exact) {
        char * const wanted = bytes, * const got = bytes + moved, * const tensor = got + moved, * const expected = tensor + whole;
        struct ggml_tensor * of = ggml_new_tensor_2d(context, type, all, elements);
        kvt_fill_patterns(type, wanted, moved/size);
        memset(expected, filler, whole);
        exact = ggml_backend_tensor_alloc(buffer, of, ggml_backend_buffer_get_base(buffer)) == GGML_STATUS_SUCCESS;
        if (exact) {
            ggml_backend_tensor_set(of, expected, 0, whole);
            for (size_t element = 0; element < elements; ++element) {
                memcpy(expected + element*all*size + runs[0].first_byte, wanted + element*cells*size, cells*size);
                memcpy(expected + element*all*size + runs[1].first_byte, wanted + part + element*size, size);
            }
            exact = kvt_move_columns(by, of, columns, runs, 2, wanted, true) && kvt_move_columns(by, of, columns, runs, 2, got, false);
            ggml_backend_tensor_get(of, tensor, 0, whole);
            exact = exact && memcmp(got, wanted, moved) == 0 && memcmp(tensor, expected, whole) == 0;
        }
    }
    free(bytes);
    ggml_backend_buffer_free(buffer); // NULL is nothing
    if (context != NULL) {
        ggml_free(context);
    }
    return exact;
}

// The device that has this tensor; NULL if it cannot copy exactly, or has no memory left for it now. Kept as long as the process
// lives.
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
    size_t unused = 0, total = 0;
    ggml_backend_dev_memory(device, &unused, &total);
    if (count == KVT_DEVICES || (total > 0 && unused < KVT_FREE_BYTES)) {
        return NULL;
    }
    struct kvt_column_device found = { device, tensor->type, ggml_backend_dev_init(device, NULL), NULL };
    found.staging = found.queue != NULL ? ggml_backend_buft_alloc_buffer(memory, KVT_STAGING_BYTES) : NULL;
    bool tried = false;
    const bool exact = found.staging != NULL && kvt_columns_are_exact(&found, memory, tensor->type, 256, &tried);
    if (!exact) {
        ggml_backend_buffer_free(found.staging);
        ggml_backend_free(found.queue);
        found.staging = NULL;
        found.queue = NULL;
    }
    if (!exact && !tried) {
        return NULL; // it may have memory another time
    }
    devices[count++] = found;
    return exact ? &devices[count - 1] : NULL;
}

// Out of the tensor, or into it: one run behind the other, and of a run each element's cells one behind the other, without gaps.
// False if the device could not.
static inline bool kvt_get_columns(struct ggml_tensor * from, struct kvt_columns columns, const struct kvt_run * runs, size_t count, char * to) {
    const struct kvt_column_device * by = kvt_device_of_columns(from);
    return by != NULL && kvt_move_columns(by, from, columns, runs, count, to, false);
}

static inline bool kvt_set_columns(struct ggml_tensor * to, struct kvt_columns columns, const struct kvt_run * runs, size_t count, const char * from) {
    const struct kvt_column_device * by = kvt_device_of_columns(to);
    return by != NULL && kvt_move_columns(by, to, columns, runs, count, (char *) (uintptr_t) from, true);
}
