/* Exact attention on an NVIDIA GPU over K/V that lies in pages: the C interface. Words and shapes: paged_attn.h.
 *
 * device -> plan -> run. A device is the driver's primary context of one GPU. A plan is made for a shape from an
 * image (the kernels compiled for the shape and the GPU) and owns device memory for partial states. A run queues
 * kernels on the caller's stream and returns; nothing is allocated, nothing waits. Partial states lie in slots:
 *
 *     pa_cuda_attend(plan, hot pages,   slot 0, ...);       // VRAM, several splits
 *     pa_cuda_attend(plan, staged run,  slot s, ...);       // as each arrives (pa_cuda_ring, below)
 *     pa_cuda_put_state(plan, slot t, the CPU's partial);   // a share computed elsewhere
 *     pa_cuda_combine(plan, all slots, sinks, out);
 *
 * Every address in pa_args, pa_rows, pa_mask is a device address here, and pa_rows.pages a device array of device
 * addresses. f16 and bf16 rows, pages and strides are multiples of 16 bytes; q8_0 and q4_0 of 2 (of 4: faster, and
 * required when the image says so). V of cells that some query does not see must be finite, but for empty ones
 * (cell_pos < 0). Streams are CUstream (cudaStream_t). One plan is used by one thread and one stream at a time. The text
 * of an error: pa_cuda_last_error() of the same thread.
 */
#ifndef PAGED_ATTN_CUDA_H
#define PAGED_ATTN_CUDA_H

#include "paged_attn.h"

#ifdef __cplusplus
extern "C" {
#endif

PA_API const char *pa_cuda_last_error(void); /* of this thread; never null */

typedef struct pa_cuda_device pa_cuda_device;

/* PA_NO_DEVICE: no driver library, or the driver finds no such GPU. PA_UNSUPPORTED: the driver is older than this code
 * needs. PA_DEVICE_ERROR: there is a driver and it does not start. The sentence says which, with the driver's code. */
PA_API pa_status pa_cuda_open(int32_t ordinal, pa_cuda_device **device);
PA_API int32_t pa_cuda_arch(const pa_cuda_device *device); /* compute capability x 10, 52 to 120 */
PA_API int32_t pa_cuda_multiprocessors(const pa_cuda_device *device);
/* Waits for what is queued on `stream`. PA_DEVICE_ERROR: a kernel failed since; an error that no call has told yet, so
 * ask here before the next, innocent call is blamed. */
PA_API pa_status pa_cuda_synchronize(pa_cuda_device *device, void *stream);
PA_API void pa_cuda_close(pa_cuda_device *device); /* after its plans and rings; null is allowed */

/* ---- attention */
typedef struct pa_cuda_plan pa_cuda_plan;

/* image: a cubin of csrc/cuda/instance.cu for this shape and this GPU (ollama_tiering.kernels.nvrtc makes them).
 * n_slots: partial states held of a run of max_q queries; of fewer queries the same memory holds more (pa_cuda_slots).
 * Two are enough for a prefill that joins, and of 512 queries they are 1024 of one. PA_BAD_ARGUMENT: the image is for another shape; PA_UNSUPPORTED: no kernel for the
 * shape; PA_OUT_OF_MEMORY: the slots do not fit. */
PA_API pa_status pa_cuda_plan_create(pa_cuda_device *device, const pa_shape *shape, int32_t n_slots, const void *image,
                                     size_t image_bytes, pa_cuda_plan **plan);
PA_API int32_t pa_cuda_slots(const pa_cuda_plan *plan, int32_t n_q); /* partial states of n_q queries that fit */
PA_API size_t pa_cuda_plan_bytes(const pa_cuda_plan *plan); /* device memory held */
PA_API void pa_cuda_plan_destroy(pa_cuda_plan *plan);       /* the stream's work must have ended; null is allowed */

/* For measurements: runs of up to `most` rows (queries x heads of a group) take the f32 kernel, longer ones tensor cores,
 * where the image has both. -1: as the library chooses, which is what no call of this means. */
PA_API pa_status pa_cuda_decode_rows(pa_cuda_plan *plan, int32_t most);

/* How many slots a run over n_cells cells fills when it may choose: enough blocks for the whole GPU, at most
 * `most`. 1 when there are queries enough. More than `most` where fewer would not do (heads of more than 128 values on
 * tensor cores have a limit of cells per split, PA_BAD_ARGUMENT beyond it). */
PA_API int32_t pa_cuda_splits(const pa_cuda_plan *plan, int32_t n_q, int32_t n_cells, int32_t most);

/* No split of this plan's runs has more than `most` cells, from now on, nor more than its image allows. */
PA_API pa_status pa_cuda_split_cells(pa_cuda_plan *plan, int32_t most);

/* Queues what a mask by positions needs, once for all layers of a batch instead of once a layer: runs of this plan whose
 * cell_pos, cell_seq and n_cells are these do not queue it again, until a run with others, or the next call of this (null:
 * none). The arrays must not change meanwhile. */
PA_API pa_status pa_cuda_prepare(pa_cuda_plan *plan, const pa_mask *mask, int32_t n_cells, void *stream);

/* Queues attention of args' cells: states into slots first .. first + n_splits - 1. `join` != 0: each state joins what
 * its slot holds, of a run in as many splits. args' out, state_* and sinks are not looked at. */
PA_API pa_status pa_cuda_attend(pa_cuda_plan *plan, const pa_args *args, int32_t first, int32_t n_splits, int32_t join,
                                void *stream);

/* Copies the page tables to the host and looks at them: a page that is null or not aligned would end the context for
 * everybody in the process. Once a table, not once a run: it waits. */
PA_API pa_status pa_cuda_check_pages(pa_cuda_plan *plan, const pa_args *args);

/* Queues the copy of a state from host memory (pinned, or the copy waits) into a slot:
 * o [n_q][n_head][d_v], then m [n_q][n_head], then l [n_q][n_head], contiguous. */
PA_API pa_status pa_cuda_put_state(pa_cuda_plan *plan, int32_t slot, int32_t n_q, const float *state, void *stream);

/* Queues out = merge of slots 0 .. n_slots - 1 (and sinks [n_head] or null), divided. out: [n_q][n_head][d_v], 16-byte
 * aligned. */
PA_API pa_status pa_cuda_combine(pa_cuda_plan *plan, int32_t n_q, int32_t n_slots, const float *sinks, float *out,
                                 void *stream);

/* ---- delivery: cold pages from pinned host memory through a ring of buffers in VRAM, ahead of their use */
typedef struct pa_cuda_ring pa_cuda_ring;

typedef struct pa_piece { /* one copy: K and V of a run of pages side by side */
    const void *host;     /* pinned */
    size_t bytes;         /* at most the ring's slot_bytes */
} pa_piece;

PA_API pa_status pa_cuda_ring_create(pa_cuda_device *device, int32_t n_slots, size_t slot_bytes, pa_cuda_ring **ring);
PA_API uint64_t pa_cuda_ring_slot(const pa_cuda_ring *ring, int32_t piece); /* device address that piece i goes to */

/* A token: all pieces of all layers, in order of use; the first copies are queued at once. The array is kept by the
 * caller until the token ends. PA_BAD_ARGUMENT while another token is under way. After any error none of this one is,
 * and no copy either. Not on a stream that is being captured: events of another stream would join the capture. */
PA_API pa_status pa_cuda_ring_begin(pa_cuda_ring *ring, const pa_piece *pieces, int32_t n_pieces);
/* `stream` waits until piece i has arrived (i in order, from 0). Queue its kernels on `stream`, then: */
PA_API pa_status pa_cuda_ring_acquire(pa_cuda_ring *ring, int32_t piece, void *stream);
/* ... the slot is free once what is queued on `stream` has run; the copy of a later piece is queued. */
PA_API pa_status pa_cuda_ring_release(pa_cuda_ring *ring, int32_t piece, void *stream);
/* The token is over; the ring may begin again. PA_CANCELLED when pieces were left: no further copies, and those under
 * way have ended. PA_OK when none were left, at once: the last copies may still read the host's memory, which stays as
 * it is until pa_cuda_ring_wait, or until what was queued after the last acquire has run. */
PA_API pa_status pa_cuda_ring_end(pa_cuda_ring *ring);
/* Between tokens: returns when every copy has ended, so that the pieces' memory is the caller's again. */
PA_API pa_status pa_cuda_ring_wait(pa_cuda_ring *ring);
PA_API void pa_cuda_ring_destroy(pa_cuda_ring *ring); /* ends it first; null is allowed */

/* ---- hybrid: how many of `n_pieces` equal cold pieces the CPU should take so that both sides end together */
typedef struct pa_rates {
    double stream_bytes_per_s; /* pinned host to device, measured */
    double cpu_bytes_per_s;    /* K/V bytes that the CPU kernel attends to, measured */
    double memory_bytes_per_s; /* what host memory delivers to both together, measured */
    double head_start_s;       /* how long copies run before the CPU has its query */
} pa_rates;
/* 0 where the CPU does not help. PA_BAD_ARGUMENT: a rate that is not a positive number, n_pieces or bytes negative. */
PA_API pa_status pa_cuda_cpu_share(const pa_rates *rates, int32_t n_pieces, size_t piece_bytes, int32_t *cpu_pieces);

#ifdef __cplusplus
}
#endif
#endif
