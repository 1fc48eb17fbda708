// A mirror: the first cells of a paged K or V in memory of the device as well, with the bits that pinned memory has.
//
// An attention that sees no other cells reads the mirror: nothing crosses the bus. One that sees more gets the first
// cells of its staging memory out of the mirror, and the rest over the bus.
//
// What a mirror has is a beginning of the tensor, `valid` bytes; it grows when an attention sees more. It is right only
// as long as every write is known. So writes are counted where graphs are built (overlay
// ml/backend/ggml/kvpaged_writes.go): each SET_ROWS into paged K/V has in its op_params the number that the count had,
// and the lowest and highest cell that it writes. Whatever else writes there only counts: a shift of the context, a
// restore by the host. If the number that comes is not the next one, somebody wrote whom nobody has seen here, and the
// mirror begins anew. An attention in whose graph no such write of its K and of its V was seen does not use it.
#pragma once
#include "shim.h"

#include <cstdint>

namespace shim {

struct Mirror {
    const ggml_tensor *root = nullptr; // K or V
    size_t offset = 0;                 // in the buffer of all mirrors
    size_t cell = 0;                   // its bytes
    size_t all = 0;                    // bytes of the tensor
    size_t wanted = 0;                 // of the mirror, in bytes: whole cells, as planned
    size_t size = 0;                   // as there was memory for
    size_t valid = 0;                  // bytes from the beginning that are as in pinned memory
    uint32_t number = 0;               // of the last write
};

// K or V of a layer in one graph. All places are bytes from the beginning of the tensor.
struct Part {
    const Mirror *mirror = nullptr;
    int write = 0;             // the SET_ROWS
    size_t start = 0, end = 0; // what the attention sees
    size_t trusted = 0;        // up to here the mirror was right before the graph
    size_t kept = 0;           // up to here it still is after the write, which begins there or behind
    size_t high = 0;           // where the write ends
    uint32_t number = 0;       // of the write
};

// How a layer's attention comes by its K and V. Without mirrors: all over the bus.
struct Use {
    bool mirrored = false;
    bool whole = false; // the mirrors have all that is seen and written: no staging memory is needed
    Part k, v;
    std::vector<Piece> pieces; // that it is attended in (pieces.cpp); none: as a whole
};

// The mirrors of one backend. Like a backend they are used by one thread at a time.
class Mirrors {
  public:
    explicit Mirrors(const Device &device);
    ~Mirrors();
    Mirrors(const Mirrors &) = delete;
    Mirrors &operator=(const Mirrors &) = delete;

    // How many cells fit what the plan has left for them on the device: of the graph's layers, and of those of the graphs
    // before it, since the last reset.
    void plan(const ggml_cgraph *graph, const std::vector<Layer> &layers);
    void provide(); // takes their memory, of fewer cells if need be; where none fits, there are none
    bool taken() const { return buffer_ != nullptr; }
    size_t bytes() const { return refused_ ? 0 : bytes_; } // planned
    void refuse();                                         // gives the memory back, and takes none for this plan
    void reset();                                          // gives the memory back, and forgets the plan

    // Looks at all that a graph writes, and says for each layer what its mirrors are good for. The mirrors' state is then
    // that of after the graph: it has to be computed, or distrust() be called.
    std::vector<Use> look(const ggml_cgraph *graph, const std::vector<Layer> &layers);
    void distrust();

    // The part of a K or V that `view` shows, in its mirror.
    ggml_tensor in_mirror(const Part &part, const ggml_tensor *view) const;
    // Bytes of a mirror, as a tensor of their own.
    ggml_tensor bytes_of(const Part &part, size_t from, size_t to) const;

  private:
    void lay_out(size_t cells);
    void give_back();
    Mirror *mirror_of(const ggml_tensor *root);
    bool look_at(const ggml_cgraph *graph, const Layer &layer, int side, Part &part);
    void settle(const Use &use, const Part &part);

    const Device &device_;
    const size_t most_cells_; // OLLAMA_PAGED_MIRROR
    std::vector<Mirror> mirrors_;
    size_t cells_ = 0, bytes_ = 0;
    bool refused_ = false; // there was no memory
    ggml_backend_buffer_t buffer_ = nullptr;
};

// What a SET_ROWS into paged K/V has in its op_params.
struct Tag {
    int32_t magic;
    uint32_t number;
    int32_t lowest, highest; // cells
};
constexpr int32_t kTagMagic = 0x6d70766b; // "kvpm"

// Cells of a layer's K or V as it sees them, from the first on: that nothing of the graph writes before its attention, 0 if
// a write does not say; and that are in the mirror once it has caught up.
size_t settled_cells(const ggml_cgraph *graph, const Layer &layer, const ggml_tensor *seen);
size_t mirrored_cells(const Part &part, const ggml_tensor *seen);

inline size_t row_bytes(const ggml_tensor *seen) { return seen->nb[1]; } // of a cell
size_t begin_of(const ggml_tensor *view); // in the tensor that it is a part of, in bytes
ggml_tensor bytes_in(ggml_backend_buffer_t buffer, size_t offset, size_t size);

} // namespace shim
