// libggml-cuda-tiering.so lies beside the stock libggml-cuda.so, which stays as it is. GGML's loader prefers a
// libggml-cuda-*.so whose score is above 0; ours is 0 unless OLLAMA_PAGED_ATTN=1. It opens the stock library, forwards
// all through the public backend interface (ggml-backend-impl.h), and adds for every device
//   - a buffer type CUDA<i>_Paged: the stock backend's pinned memory, which the device reads and writes in place,
//   - attention (FLASH_ATTN_EXT) over K/V that lie there, over copies in staging memory: by the stock kernel, or by
//     csrc's (exact.h).
// Buffers, buffer types and events are the stock library's own objects; only its devices and backends are wrapped.
#pragma once
#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace shim {

// What computes attention on a device instead of the stock library.
struct Engine {
    bool chosen = false;
    std::string name;             // "exact." and a digest of all that its results' bits depend on; "": the stock library
    std::map<std::string, std::string> images; // files of kernels, and their bytes, which the digest is of
    int arch = 0;                 // compute capability x 10
};

struct Device {
    ggml_backend_dev_t inner = nullptr; // of the stock library
    ggml_backend_device outer{};        // what GGML sees
    ggml_backend_buffer_type paged{};   // K/V in pinned memory
    std::string paged_name;
    int ordinal = 0;                    // among the devices of the stock library
    Engine engine;
    bool ahead = true;                  // there is room on the device for copies ahead of their layer
    size_t mirror_bytes = 0;            // room for mirrors (mirror.h), of the plan
    mutable std::atomic<size_t> mirrored{0}; // bytes that mirrors have taken, of all backends
    void (*free_pinned)(ggml_backend_buffer_t) = nullptr; // of the stock library's pinned buffers
};

// Memory on the device for copies of K and V.
struct Slot {
    ggml_backend_buffer_t k = nullptr, v = nullptr;
    ggml_backend_event_t filled = nullptr, drained = nullptr; // the copy has come; the attention has read it
};

class Exact;
class Mirrors;
struct Use;

// Two slots that take turns; the second for copies ahead only.
struct Staging {
    Slot slots[2];
    size_t k_bytes = 0, v_bytes = 0; // of a slot, as noted; 0: nothing goes there
    bool one_slot = false;           // there was no memory for the second
    size_t drained = 0;              // copies of the graph at hand whose attention is queued
};

// Some consecutive splits of a round of engine 2 (exact.h), which one launch attends.
enum class From { device, ahead, after }; // lies on the device; or is copied: before the graph has written its rows, or not
struct Piece {
    From from;
    int round, first_split, n_splits;
    size_t first_cell, end_cell; // of those that the attention sees
};

// What the second stream copies at once.
struct Copy {
    const ggml_tensor *node; // the attention
    const Use *use;
    size_t layer;            // of a piece: among those of the graph that are cut
    const Piece *piece;      // null: all that the layer sees
    Staging *to;
    size_t turn;             // among the copies that go there
};

// An attention node over K/V in pinned memory, and the nodes that write them.
struct Layer {
    int attention = 0;
    std::vector<int> writes; // SET_ROWS between the layer before and the attention
    bool ahead = true;       // nothing else writes them in this graph: they may be copied before it has come here
};

inline const ggml_tensor *root(const ggml_tensor *tensor) { return tensor->view_src ? tensor->view_src : tensor; }

bool ring_wanted();   // OLLAMA_PAGED_RING
size_t chunk_cells(); // OLLAMA_PAGED_CHUNK_SIZE; if it is not set, more than there are

// Computes graphs of one backend. Like a backend itself it is used by one thread at a time.
class Pager {
  public:
    Pager(const Device &device, ggml_backend_t compute);
    ~Pager();
    Pager(const Pager &) = delete;
    Pager &operator=(const Pager &) = delete;

    ggml_status compute(ggml_cgraph *graph, int batch_size);
    ggml_status reserve(ggml_cgraph *graph, bool alloc); // notes the staging that the graph needs, takes it with alloc
    size_t staging_bytes() const;                        // as noted by reserve, or by a larger graph since
    void synchronize();
    void reset(); // gives the staging back

  private:
    ggml_status paged(ggml_cgraph *graph, const std::vector<Layer> &layers, std::vector<Use> &uses, int batch_size);
    ggml_status sequential(ggml_cgraph *graph, const std::vector<Layer> &layers, const std::vector<Use> &uses, int batch_size);
    ggml_status prefetching(ggml_cgraph *graph, const std::vector<Layer> &layers, const std::vector<Use> &uses, int batch_size);
    void begin_copies(const ggml_cgraph *graph, const std::vector<Layer> &layers, const std::vector<Use> &uses);
    void copy_ahead();
    ggml_status over_mirror(ggml_cgraph *graph, int next, const Layer &layer, const Use &use, int batch_size);
    std::vector<Piece> pieces_of(const ggml_cgraph *graph, const Layer &layer, const Use &use);
    ggml_status pieces_in_turn(const ggml_tensor *node, const Use &use);
    ggml_status pieces_ahead(const ggml_tensor *node, const Use &use);
    ggml_status attend_mirror(const ggml_tensor *node, const Use &use, const Piece &piece);
    ggml_status attend(const Slot &slot, const ggml_cgraph *graph, const ggml_tensor *node, int batch_size);
    ggml_status attend(const ggml_cgraph *graph, const ggml_tensor *node, ggml_tensor k, ggml_tensor v, int batch_size);
    ggml_status write_again(const ggml_cgraph *graph, ggml_tensor *write, ggml_tensor place, int batch_size);
    void fill(const Slot &slot, const ggml_tensor *node, const Use &use, const Piece *piece, ggml_backend_t stream);
    void catch_up(const Slot &slot, const ggml_tensor *node, const Use &use);
    void catch_up(const ggml_tensor *node, const Use &use);
    void copy_pinned(const ggml_tensor *rows, size_t from, size_t end, ggml_tensor to, ggml_backend_t stream);
    bool copy_within(ggml_tensor from, ggml_tensor to, ggml_backend_t stream);
    void note(const ggml_cgraph *graph, const std::vector<Layer> &layers);
    void note_pieces(const ggml_tensor *node);
    ggml_status reserve_without_mirrors(ggml_cgraph *graph, const std::vector<Layer> &layers, bool alloc);
    ggml_status run(const ggml_cgraph *graph, int first, int end, int batch_size);
    bool exact_takes(const ggml_tensor *node); // else the stock library attends
    bool exact_takes_any(const ggml_cgraph *graph);
    bool in_pieces(const ggml_tensor *node) { return ring_wanted_ && exact_takes(node); }
    bool provide_for(const std::vector<Layer> &layers); // what a graph with them needs at the least, as noted
    bool provide(size_t index); // the first slot of what is noted, or the second
    bool provide(Staging &staging, size_t index);
    void give_back(Slot &slot);
    bool may_prefetch();

    const Device &device_;
    const ggml_backend_t compute_;                 // the stock backend of this device: the stream that computes
    ggml_backend_t copier_ = nullptr;              // a second one: the stream that copies ahead
    ggml_backend_event_t begun_ = nullptr;         // the stream that computes has come to the graph
    ggml_backend_event_t written_ = nullptr;       // it has written the rows of the layer at hand
    const size_t chunk_cells_;                     // that are copied at a time
    Staging whole_;                                // as large as K and V, so that every row has its place
    Staging ring_;                                 // for pieces of them
    const bool ring_wanted_;
    std::vector<Copy> copies_;                     // of the graph at hand, in the order in which they are attended
    size_t n_queued_ = 0, n_written_ = 0;          // of them; and layers whose rows are written
    enum { unknown, yes, no } prefetch_ = unknown; // until the first layer in pinned memory
    std::unique_ptr<Exact> exact_;                 // made when it is first asked for
    const std::unique_ptr<Mirrors> mirrors_;
};

// attention.cpp
std::vector<Layer> layers_of(const ggml_cgraph *graph);

// staging.cpp
// `tensor`, or the part of it that a view shows, at the same place of a staging buffer.
ggml_tensor staged(const ggml_tensor *tensor, ggml_backend_buffer_t buffer);
void wait_for(ggml_backend_t backend);

// images.cpp
void choose_engine(Device &device);

// pinned.cpp
void make_paged_type(Device &device);
bool lies_paged(const ggml_tensor *tensor); // false for nullptr
int paged_buffers();                        // that exist, of all devices
// Whether an operation that reads or writes paged rows is one that a device is to do; all others are.
bool serves(const ggml_tensor *op);

// device.cpp
std::unique_ptr<Device> wrap_device(ggml_backend_dev_t inner, ggml_backend_reg_t reg, int ordinal);
Device &device_of(ggml_backend_dev_t outer);

// backend.cpp
ggml_backend_t wrap_backend(Device &device, ggml_backend_t inner);
ggml_backend_t inner_of(ggml_backend_t backend); // the same if it is not ours
ggml_backend_dev_t inner_of(ggml_backend_dev_t outer);

// Forward<&interface::member>::call is that member of the wrapped object.
template <auto member, typename Type = decltype(member)> struct Forward;
template <auto member, typename Interface, typename Result, typename Object, typename... Args>
struct Forward<member, Result (*Interface::*)(Object, Args...)> {
    static Result call(Object object, Args... args) {
        Object inner = inner_of(object);
        return (inner->iface.*member)(inner, args...);
    }
};
// Sets a member to the forwarding function, if the wrapped object has that member: most are optional.
template <auto member, typename Interface> void forward(Interface &outer, const Interface &inner) {
    if (inner.*member) outer.*member = Forward<member>::call;
}

} // namespace shim
