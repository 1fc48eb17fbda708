// The delivery ring. Order of the calls (architecture: docs/attention/kernels-cuda.md):
//   issue(i)    copy stream waits for drained[s]; copy; record filled[s]       s = i % n_slots
//   acquire(i)  compute waits for filled[s]
//   release(i)  record drained[s] on compute; issue(i + n_slots)
// A wait takes an event's state at the time of the call: waiting for an event that is yet to be recorded waits for
// nothing. So issue(i + n_slots) comes after drained[s] has been recorded, and filled[s] is recorded before the next
// copy is queued, or compute would wait for that one too. Events are made once. The host waits in a begin that failed, in
// a cancelled token's end, in wait and in destroy, and nowhere else.
#include "device.h"

#include <new>
#include <vector>

using namespace paged_attn::gpu;

struct pa_cuda_ring {
    struct Slot {
        CuAddress address = 0;
        CuEvent filled = nullptr, drained = nullptr;
        bool used = false;         // drained has been recorded at least once
        CuStream reader = nullptr; // of the piece that is acquired and not yet released
    };
    pa_cuda_device *device = nullptr;
    CuStream copy = nullptr;
    size_t slot_bytes = 0;
    CuAddress memory = 0;
    std::vector<Slot> slots;
    bool under_way = false; // a token is
    const pa_piece *pieces = nullptr;
    int n_pieces = 0, n_issued = 0, n_acquired = 0, n_released = 0;
    bool failed = false; // a call of this token failed; only end and destroy go on

    int size() const { return static_cast<int>(slots.size()); }
    Slot &slot(int piece) { return slots[static_cast<size_t>(piece % size())]; }

    pa_status issue(int piece) {
        const Driver &driver = device->driver;
        Slot &to = slot(piece);
        if (to.used) PA_TRY(PA_CALL(driver, cuStreamWaitEvent, copy, to.drained, 0));
        PA_TRY(PA_CALL(driver, cuMemcpyHtoDAsync_v2, to.address, pieces[piece].host, pieces[piece].bytes, copy));
        n_issued = piece + 1;
        return PA_CALL(driver, cuEventRecord, to.filled, copy);
    }
    pa_status drain(Slot &from, CuStream stream) {
        PA_TRY(PA_CALL(device->driver, cuEventRecord, from.drained, stream));
        from.used = true;
        return PA_OK;
    }
    pa_status note(pa_status status) { // of a token's call
        if (status != PA_OK) failed = true;
        return status;
    }
};

namespace {

pa_status make(pa_cuda_ring &ring) {
    const Driver &driver = ring.device->driver;
    const Current current(*ring.device);
    PA_TRY(current.status());
    PA_TRY(PA_CALL(driver, cuMemAlloc_v2, &ring.memory, ring.slot_bytes * ring.slots.size()));
    PA_TRY(PA_CALL(driver, cuStreamCreate, &ring.copy, kCuStreamNonBlocking));
    CuAddress address = ring.memory;
    for (pa_cuda_ring::Slot &slot : ring.slots) {
        slot.address = address;
        address += ring.slot_bytes;
        PA_TRY(PA_CALL(driver, cuEventCreate, &slot.filled, kCuEventDisableTiming));
        PA_TRY(PA_CALL(driver, cuEventCreate, &slot.drained, kCuEventDisableTiming));
    }
    return PA_OK;
}

pa_status check_turn(const pa_cuda_ring *ring, int piece, int turn, const char *what) {
    if (!ring) return fail(PA_BAD_ARGUMENT, "no ring");
    if (!ring->under_way) return fail(PA_BAD_ARGUMENT, "%s without a token under way", what);
    if (ring->failed) return fail(PA_DEVICE_ERROR, "an earlier call of this token failed; end it");
    if (piece != turn) return fail(PA_BAD_ARGUMENT, "%s of piece %d, but %d is next", what, piece, turn);
    if (piece >= ring->n_pieces) return fail(PA_BAD_ARGUMENT, "%s of piece %d of %d", what, piece, ring->n_pieces);
    return PA_OK;
}

} // namespace

pa_status pa_cuda_ring_create(pa_cuda_device *device, int32_t n_slots, size_t slot_bytes, pa_cuda_ring **ring) {
    if (!device || !ring) return fail(PA_BAD_ARGUMENT, "null where a device or a ring's handle goes");
    *ring = nullptr;
    if (n_slots < 3) return fail(PA_BAD_ARGUMENT, "a ring of %d slots: at least 3 keep both sides busy", n_slots);
    if (slot_bytes == 0 || slot_bytes % 16)
        return fail(PA_BAD_ARGUMENT, "slots of %zu bytes: not a multiple of 16", slot_bytes);
    auto *made = new (std::nothrow) pa_cuda_ring;
    if (!made) return fail(PA_OUT_OF_MEMORY, "no memory for a ring");
    made->device = device;
    made->slot_bytes = slot_bytes;
    try {
        made->slots.resize(static_cast<size_t>(n_slots));
    } catch (const std::bad_alloc &) {
        delete made;
        return fail(PA_OUT_OF_MEMORY, "no memory for a ring of %d slots", n_slots);
    }
    if (const pa_status status = make(*made); status != PA_OK) {
        pa_cuda_ring_destroy(made);
        return status;
    }
    *ring = made;
    return PA_OK;
}

uint64_t pa_cuda_ring_slot(const pa_cuda_ring *ring, int32_t piece) {
    return ring->slots[static_cast<size_t>(piece) % ring->slots.size()].address;
}

pa_status pa_cuda_ring_begin(pa_cuda_ring *ring, const pa_piece *pieces, int32_t n_pieces) {
    if (!ring) return fail(PA_BAD_ARGUMENT, "no ring");
    if (n_pieces < 0 || (n_pieces > 0 && !pieces))
        return fail(PA_BAD_ARGUMENT, "%d pieces at %p", n_pieces, static_cast<const void *>(pieces));
    if (ring->under_way) return fail(PA_BAD_ARGUMENT, "a token is under way");
    for (int i = 0; i < n_pieces; i++)
        if (!pieces[i].host || pieces[i].bytes == 0 || pieces[i].bytes > ring->slot_bytes)
            return fail(PA_BAD_ARGUMENT, "piece %d: %zu bytes at %p, a slot has %zu", i, pieces[i].bytes,
                        pieces[i].host, ring->slot_bytes);
    const Current current(*ring->device);
    PA_TRY(current.status());
    ring->under_way = true;
    ring->pieces = pieces;
    ring->n_pieces = n_pieces;
    ring->n_issued = ring->n_acquired = ring->n_released = 0;
    ring->failed = false;
    for (int i = 0; i < n_pieces && i < ring->size(); i++)
        if (const pa_status status = ring->issue(i); status != PA_OK) { // no token, then: the sentence is that of the cause
            ring->device->driver.cuStreamSynchronize(ring->copy);
            ring->under_way = false;
            return status;
        }
    return PA_OK;
}

pa_status pa_cuda_ring_acquire(pa_cuda_ring *ring, int32_t piece, void *stream) {
    PA_TRY(check_turn(ring, piece, ring ? ring->n_acquired : 0, "acquire"));
    if (piece >= ring->n_issued)
        return fail(PA_BAD_ARGUMENT, "acquire of piece %d before %d was released", piece, piece - ring->size());
    const Current current(*ring->device);
    PA_TRY(current.status());
    PA_TRY(ring->note(PA_CALL(ring->device->driver, cuStreamWaitEvent, stream, ring->slot(piece).filled, 0)));
    ring->slot(piece).reader = stream;
    ring->n_acquired++;
    return PA_OK;
}

pa_status pa_cuda_ring_release(pa_cuda_ring *ring, int32_t piece, void *stream) {
    PA_TRY(check_turn(ring, piece, ring ? ring->n_released : 0, "release"));
    if (piece >= ring->n_acquired) return fail(PA_BAD_ARGUMENT, "release of piece %d, which is not acquired", piece);
    if (stream != ring->slot(piece).reader)
        return fail(PA_BAD_ARGUMENT, "release of piece %d on another stream", piece);
    const Current current(*ring->device);
    PA_TRY(current.status());
    PA_TRY(ring->note(ring->drain(ring->slot(piece), stream)));
    ring->n_released++;
    if (piece + ring->size() < ring->n_pieces) PA_TRY(ring->note(ring->issue(piece + ring->size())));
    return PA_OK;
}

pa_status pa_cuda_ring_end(pa_cuda_ring *ring) {
    if (!ring) return fail(PA_BAD_ARGUMENT, "no ring");
    if (!ring->under_way) return PA_OK;
    const bool complete = !ring->failed && ring->n_released == ring->n_pieces;
    const int n_left = ring->n_pieces - ring->n_released;
    pa_status status = PA_OK;
    if (!complete) {
        const Current current(*ring->device);
        status = current.status();
        // what was queued on the readers' streams may still read: the next copies into those slots wait for it
        for (int i = ring->n_released; status == PA_OK && i < ring->n_acquired; i++)
            status = ring->drain(ring->slot(i), ring->slot(i).reader);
        if (status == PA_OK) status = PA_CALL(ring->device->driver, cuStreamSynchronize, ring->copy);
    }
    ring->under_way = false;
    if (status != PA_OK || complete) return status;
    return fail(PA_CANCELLED, "ended with %d of %d pieces left", n_left, ring->n_pieces);
}

pa_status pa_cuda_ring_wait(pa_cuda_ring *ring) {
    if (!ring) return fail(PA_BAD_ARGUMENT, "no ring");
    if (ring->under_way) return fail(PA_BAD_ARGUMENT, "a token is under way: its copies end after its last release");
    const Current current(*ring->device);
    PA_TRY(current.status());
    return PA_CALL(ring->device->driver, cuStreamSynchronize, ring->copy);
}

void pa_cuda_ring_destroy(pa_cuda_ring *ring) {
    if (!ring) return;
    pa_cuda_ring_end(ring);
    {
        const Driver &driver = ring->device->driver;
        const Current current(*ring->device);
        if (ring->copy) driver.cuStreamSynchronize(ring->copy);
        for (pa_cuda_ring::Slot &slot : ring->slots) {
            if (slot.used) driver.cuEventSynchronize(slot.drained);
            if (slot.filled) driver.cuEventDestroy_v2(slot.filled);
            if (slot.drained) driver.cuEventDestroy_v2(slot.drained);
        }
        if (ring->copy) driver.cuStreamDestroy_v2(ring->copy);
        if (ring->memory) driver.cuMemFree_v2(ring->memory);
    }
    delete ring;
}
