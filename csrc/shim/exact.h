// Engine 2 (OLLAMA_PAGED_ENGINE=exact): csrc's own kernels (docs/kernels-cuda.md) compute attention in the place of the
// stock library's. Paged layers are copied into staging memory as for engine 1, and attended there; hot ones are attended
// where they lie. Both, so that where a layer's K/V lie changes no bit of any row.
//
// The kernels run in a stream of their own, joined to the stock stream by events: they wait for what that was given
// before, and it waits for them before it goes on.
#pragma once
#include "paged_attn/paged_attn_cuda.h"
#include "shim.h"

#include <set>

namespace shim {

// What csrc's kernels serve of an operation, in their words. Nothing of it depends on where K/V lie.
struct Attention {
    pa_shape shape = {};    // max_q and max_cells are this operation's own
    pa_args args = {};      // without addresses of pages
    std::string image;      // file of kernels that it needs
    const char *declined = nullptr; // why it is the stock library's; null: it is ours
};
Attention attention_of(const Device &device, const ggml_tensor *node);

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
    void reset(); // gives the memory back

  private:
    struct Plan {
        pa_shape shape;
        pa_cuda_plan *made = nullptr; // for a smaller shape than noted, if it was made before
        pa_shape made_for = {};
    };
    pa_status open();
    pa_status make(Plan &plan);
    pa_status queue(const ggml_tensor *node, const void *k, const void *v);
    pa_status follow(); // our stream waits for the stock stream
    pa_status lead();   // the stock stream waits for ours
    Plan *plan_of(const pa_shape &shape);
    bool said(pa_status status) const;

    const Device &device_;
    const ggml_backend_t compute_; // the stock stream
    pa_cuda_device *gpu_ = nullptr;
    void *stream_ = nullptr;
    unsigned long long pages_ = 0; // on the device: address of K, address of V
    ggml_backend_event_t before_ = nullptr, after_ = nullptr; // null: in a build without events
    std::vector<Plan> plans_;
    std::set<std::string> declined_; // said
};

} // namespace shim
