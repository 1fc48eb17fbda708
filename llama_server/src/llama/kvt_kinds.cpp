#include "kvt_kinds.h"

#include "common.h"
#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-model.h"

#include <algorithm>
#include <cstdlib>

namespace kvt {

using std::string;

namespace {

// With commas around each.
string refused_kinds() {
    const char * given = std::getenv("OLLAMA_KV_TIER_REFUSED_KINDS");
    return given != nullptr && *given != '\0' ? "," + string(given) + "," : "";
}

} // namespace

bool images_refused() { return refused_kinds().find(",images,") != string::npos; }

string refused_kind(const common_params & params, llama_context * ctx, const memory_parts & parts, const std::vector<plane> & planes) {
    const string all = refused_kinds();
    if (all.empty()) {
        return "";
    }
    const auto & cparams = ctx->get_cparams();
    const bool quantised = std::any_of(planes.begin(), planes.end(), [](const plane & one) { return ggml_is_quantized(one.tensor->type); });
    const struct { const char * name; bool is; } kinds[] = {
        { "no-flash-attention", !cparams.flash_attn },
        { "quantised", quantised },
        { "windows", parts.window != nullptr },
        { "states", parts.states && parts.window == nullptr },
        { "slots", cparams.n_seq_max > 1 },
        { "shared-cells", share_cells(ctx, parts) },
        { "context-shift", params.ctx_shift },
        { "latent", !parts.has_v },
        { "axes", llama_get_model(ctx)->hparams.n_pos_per_embd() > 1 },
    };
    for (const auto & kind : kinds) {
        if (kind.is && all.find("," + string(kind.name) + ",") != string::npos) {
            return string(kind.name) + " failed the self-test with this llama.cpp";
        }
    }
    return "";
}

} // namespace kvt
