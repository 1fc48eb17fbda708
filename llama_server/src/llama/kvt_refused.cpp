#include "kvt_refused.h"

#include "kvt_complete.h"
#include "kvt_given.h"
#include "kvt_kinds.h"

#include "common.h"
#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>

namespace kvt {

using std::string;

string base_name(const string & path) { return path.substr(path.rfind('/') + 1); }

drafts drafting_of(llama_context * ctx, llama_context * draft, bool speculates) {
    if (draft == nullptr) {
        return speculates ? drafts::of_tokens : drafts::none;
    }
    return draft->get_cparams().ctx_other == ctx && holds_nothing(draft) ? drafts::of_tokens : drafts::of_rows;
}

string why_not(const common_params & params, llama_context * ctx, drafts drafting, const used_files & loaded, std::vector<plane> & planes) {
    string why;
    const auto parts = parts_of(ctx, why);
    if (parts.rows == nullptr) {
        return why;
    }
    const auto & cparams = ctx->get_cparams();
    const auto & hparams = llama_get_model(ctx)->hparams;
    const bool recurrent = parts.states && parts.window == nullptr;
    if (drafting == drafts::of_rows || (drafting == drafts::of_tokens && recurrent)) { // states are rolled back, and cut batches otherwise
        return "speculative decoding";
    }
    if (params.embedding || !cparams.causal_attn ||
        (cparams.pooling_type != LLAMA_POOLING_TYPE_NONE && cparams.pooling_type != LLAMA_POOLING_TYPE_UNSPECIFIED)) {
        return "embedding model";
    }
    if (hparams.swa_type != LLAMA_SWA_TYPE_NONE && (parts.window == nullptr || hparams.swa_type != LLAMA_SWA_TYPE_STANDARD)) {
        return parts.window == nullptr ? "sliding windows in a cache that is not known here" : "windows that do not slide (chunks)";
    }
    if (parts.window != nullptr && params.swa_full) { // the server would believe that rows are there which no state has
        return "sliding windows that are kept whole (--swa-full)";
    }
    if (parts.states && params.n_ctx_checkpoints <= 0) {
        return "checkpoints are turned off (--ctx-checkpoints 0)";
    }
    if (waits_for_tokens(params)) {
        return "LoRA adapters that are applied from some tokens on";
    }
    if (loaded.size() > most_files) {
        return "more than " + std::to_string(most_files) + " files";
    }
    if (const string changed = why_changed(loaded, look_at_files(params)); !changed.empty()) {
        return changed;
    }
    if (share_cells(ctx, parts)) {
        // A window's cells follow from positions only where one slot has them alone. What moves a slot's rows moves those that another
        // slot shares with it, and nobody is told.
        const char * with = parts.window != nullptr ? "sliding windows" : params.ctx_shift ? "a context shift" : params.n_cache_reuse > 0 ? "--cache-reuse" : "";
        if (*with != '\0') {
            return string("slots that share cells (-kvu), with ") + with;
        }
    }
    planes = planes_of(*parts.rows, 0, parts.has_v, why);
    const auto windows = parts.window != nullptr ? planes_of(*parts.window, 0, parts.has_v, why) : std::vector<plane>();
    if (!std::all_of(planes.begin(), planes.end(), can_copy) || !std::all_of(windows.begin(), windows.end(), can_copy)) {
        return "V is transposed on a device that cannot copy it exactly (flash attention avoids that)";
    }
    if (planes.empty()) {
        return why.empty() ? "layers that are not understood" : why;
    }
    return refused_kind(params, ctx, parts, planes);
}

} // namespace kvt
