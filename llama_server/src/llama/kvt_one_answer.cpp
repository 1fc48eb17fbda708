#include "kvt_one_answer.h"

#include "common.h"
#include "ggml-backend.h"
#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-model.h"

#include <algorithm>

namespace kvt {

namespace {

// Any other device may compute for the CPU where many tokens come at once (a GPU, BLAS).
bool only_cpu() {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        if (ggml_backend_dev_type(ggml_backend_dev_get(i)) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            return false;
        }
    }
    return true;
}

bool is_tested(ggml_type weights) {
    switch (weights) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q6_K: return true; // a part of those of Q4_K_M
        default: return false;
    }
}

bool tested_weights(const llama_model & model) {
    const auto & all = model.tensors_by_name;
    return !all.empty() && std::all_of(all.begin(), all.end(), [](const auto & one) {
        return is_tested(one.second->type) && one.first.find("sinks") == std::string::npos;
    });
}

// Those that the kernels serve; else the attention is stock's.
bool served(const plane & one) {
    const auto type = one.tensor->type;
    return !one.transposed && ((type == GGML_TYPE_F16 && one.head_dim % 16 == 0) || (type == GGML_TYPE_Q8_0 && one.head_dim % 32 == 0));
}

} // namespace

bool gives_one_answer(const common_params & params, llama_context * ctx, const memory_parts & parts, const std::vector<plane> & planes,
                      const std::string & attention) {
    const auto & model = *llama_get_model(ctx);
    return !attention.empty() && ctx->get_cparams().flash_attn && !parts.states && parts.window == nullptr && !share_cells(ctx, parts) &&
           params.lora_adapters.empty() && params.control_vectors.empty() && params.mmproj.path.empty() && !model.hparams.use_alibi &&
           only_cpu() && tested_weights(model) && std::all_of(planes.begin(), planes.end(), served);
}

} // namespace kvt
