// A graph as it was launched: kernels hold their arguments, so that later changes of the caller's tensors do not reach it.
#pragma once
#include "ggml-impl.h"

#include <deque>
#include <unordered_map>
#include <vector>

namespace fakegpu {

class Launch {
public:
    // Every address is made one that the CPU backend may use. A tensor that device `device` could not read or write,
    // because it lies elsewhere or not wholly in one allocation, is a fault.
    Launch(const ggml_cgraph &graph, int device);
    Launch(const Launch &) = delete;
    Launch &operator=(const Launch &) = delete;

    ggml_cgraph graph{};
    size_t attention_nodes = 0, written_rows_nodes = 0;

private:
    ggml_tensor *take(const ggml_tensor *tensor);
    void check(const ggml_tensor *node, const ggml_tensor *used, const char *as) const;

    const int device_;
    std::deque<ggml_tensor> tensors_;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> taken_;
    std::vector<ggml_tensor *> nodes_;
};

} // namespace fakegpu
