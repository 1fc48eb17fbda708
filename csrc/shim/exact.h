// Engine 2 (OLLAMA_PAGED_ENGINE=exact): csrc's own kernels (docs/attention/kernels-cuda.md) compute attention in the place of the
// stock library's. Paged layers are copied piece by piece and attended there (pieces.cpp); hot ones are attended where they
// lie. Both, so that where a layer's K/V lie changes no bit of any row.
//
// The kernels run in a stream of their own, joined to the stock stream by events: they wait for what that was given
// before, and it waits for them before it goes on.
#pragma once
#include "paged_attn/paged_attn_cuda.h"
#include "shim.h"

#include <map>
#include <set>
#include <utility>

namespace shim {

// What csrc's kernels serve of an operation, in their words. Nothing of it depends on where K/V lie.
struct Attention {
    pa_shape shape = {};    // max_q and max_cells are this operation's own
    pa_args args = {};      // without addresses of pages
    std::string image;      // file of kernels that it needs
    const char *declined = nullptr; // why it is the stock library's; null: it is ours
};
Attention attention_of(const Device &device, const ggml_tensor *node); // served.cpp
bool shape_of(const std::string &image, pa_shape &shape);              // what it is for, by its name; false: no image

// Queries whose states a plan holds at the least, this many times: how a run is cut must not follow from how large a batch
// may be.
constexpr int kQueries = 512, kStates = 2;

struct Cut { // cut.cpp
    int n_units = 0; // of 64 cells
    int n_rounds = 1, n_splits = 1;
    int first_cell(int round, int split) const; // of n_splits: the round's end, of the last round or more

  private:
    int first_unit(int round) const;
};
Cut cut_of(const pa_cuda_plan *plan, const pa_shape &shape, int n_q, int n_cells);

// How far an attention's cells reach that lie on the device, that its graph does not write; and how many a slot holds.
struct Reach {
    size_t on_device = 0, settled = 0, slot = 0;
};
std::vector<Piece> pieces_of(const Cut &cut, size_t n_cells, const Reach &reach);
size_t slot_cells(size_t cell_bytes); // of K and V: cells that a slot has room for, one split at the least
pa_status limit_splits(pa_cuda_plan *plan); // of a new plan: what cut_of counts on
size_t plan_bytes(const pa_shape &shape);   // what a plan takes on the device (csrc/cuda/host/plan.cpp)

// Where K and V lie, as the kernels are told: pairs of addresses on the device (places.cpp).
class Places {
  public:
    pa_status open(pa_cuda_device *gpu);
    void close();
    // Where the two addresses stand on the device, for what is queued on `stream` from now on, always the same stream,
    // and until the next call.
    pa_status find(const void *k, const void *v, void *stream, const void *const **entry);

  private:
    pa_cuda_device *gpu_ = nullptr;
    unsigned long long table_ = 0;
    std::map<std::pair<const void *, const void *>, unsigned long long> known_;
};

// Attention of one backend. Like a backend it is used by one thread at a time.
class Exact {
  public:
    Exact(const Device &device, ggml_backend_t compute) : device_(device), compute_(compute) {}
    ~Exact();
    Exact(const Exact &) = delete;
    Exact &operator=(const Exact &) = delete;

    // By what the operation is, and by nothing that may happen: K/V that one engine computed are never taken for the
    // other's. Says once what is declined, and why.
    bool takes(const ggml_tensor *node);
    void note(const ggml_tensor *node); // memory that it needs; of what it takes
    bool provide();                     // takes what was noted; false where it does not fit
    size_t bytes() const;               // noted
    // Queues the operation over K and V that lie at k and v. A launch that fails fails the graph, and is said.
    ggml_status attend(const ggml_tensor *node, const void *k, const void *v);
    // The same in pieces: begin, attend for each of them in order, its own first cell at k and v, and end.
    Cut cut(const ggml_tensor *node); // memory was provided for it
    ggml_status begin(const ggml_tensor *node);
    ggml_status attend(const Piece &piece, const void *k, const void *v);
    ggml_status end();
    // Between pieces.
    ggml_status follow();                          // our stream waits for the stock stream
    ggml_status lead();                            // the stock stream waits for ours
    ggml_status wait(ggml_backend_event_t event);  // our stream waits for an event of the stock library
    ggml_status record(ggml_backend_event_t event);
    void reset(); // gives the memory back

  private:
    struct Plan {
        pa_shape shape;
        std::string image;            // heads' sizes and types of K/V, too
        pa_cuda_plan *made = nullptr; // for a smaller shape than noted, if it was made before
        pa_shape made_for = {};
    };
    pa_status open();
    pa_status try_open();
    void close();
    pa_status make(Plan &plan);
    // An operation that was begun.
    struct Run {
        Attention attention;
        pa_cuda_plan *plan = nullptr;
        Cut cut;
    };
    pa_status find_run(const ggml_tensor *node, Run &run);
    pa_status queue(const ggml_tensor *node, const void *k, const void *v);
    pa_status launch(const Piece &piece, const void *k, const void *v);
    pa_status combine();
    pa_status queue_follow();
    pa_status queue_lead();
    Plan *plan_of(const Attention &attention);
    bool said(pa_status status) const;
    ggml_status told(pa_status status) const;

    const Device &device_;
    const ggml_backend_t compute_; // the stock stream
    pa_cuda_device *gpu_ = nullptr;
    void *stream_ = nullptr;
    Places places_;
    ggml_backend_event_t before_ = nullptr, after_ = nullptr; // null: in a build without events
    std::vector<Plan> plans_;
    Run run_;
    std::set<std::string> declined_; // said
};

} // namespace shim
