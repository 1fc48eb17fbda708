#include "kvt_checkpoints.h"

#include "kvt_cache.h"
#include "kvt_images.h"
#include "kvt_rows.h"

#include "common.h"
#include "llama-kv-cache.h"
#include "llama.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace kvt {

namespace {

constexpr llama_state_seq_flags partial = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;

state copy_of(const common_prompt_checkpoint & one) {
    state made = make_state({ (uint32_t) one.n_tokens, one.pos_min, one.pos_max }, one.data_tgt.size());
    std::memcpy(made.bytes.data() + state_head_bytes, one.data_tgt.data(), one.data_tgt.size());
    return made;
}

// Those behind the first `held` tokens are of another prompt.
void forget_behind(checkpoints & all, uint32_t held, const std::vector<int32_t> & tokens) {
    const llama_pos next = position_at(tokens, held);
    all.remove_if([held, next](const common_prompt_checkpoint & one) { return one.n_tokens > (int64_t) held || one.pos_max >= next; });
}

// Windows are stored by rows, too: what llama.cpp takes long to copy is not copied once more.
bool has_quick_end(llama_context * ctx, int32_t seq) {
    std::string why;
    const auto parts = parts_of(ctx, why);
    const auto planes = parts.window != nullptr ? planes_of(*parts.window, seq, parts.has_v, why) : std::vector<plane>();
    return std::none_of(planes.begin(), planes.end(), lies_apart);
}

bool copy_end(llama_context * ctx, int32_t seq, const std::vector<int32_t> & tokens, std::vector<state> & to) {
    const auto n_tokens = (uint32_t) tokens.size();
    const llama_pos least = llama_memory_seq_pos_min(llama_get_memory(ctx), seq);
    const size_t bytes = llama_state_seq_get_size_ext(ctx, seq, partial);
    if (least < 0 || bytes == 0) {
        return false;
    }
    state made = make_state({ n_tokens, least, position_at(tokens, n_tokens) - 1 }, bytes);
    auto * at = reinterpret_cast<uint8_t *>(made.bytes.data() + state_head_bytes);
    if (llama_state_seq_get_data_ext(ctx, at, bytes, seq, partial) != bytes) {
        return false;
    }
    to.push_back(std::move(made));
    return true;
}

} // namespace

bool ends_after(llama_context * ctx, int32_t seq, uint32_t n_tokens, const std::vector<int32_t> & tokens) {
    return n_tokens > 0 && llama_memory_seq_pos_max(llama_get_memory(ctx), seq) == position_at(tokens, n_tokens) - 1;
}

marks marks_behind(const checkpoints & all, uint32_t held) {
    marks found;
    for (const auto & one : all) {
        if (one.n_tokens > (int64_t) held) {
            found.emplace_back(&one, one.n_tokens);
        }
    }
    return found;
}

void forget(checkpoints & all, const marks & marked) {
    all.remove_if([&marked](const common_prompt_checkpoint & one) {
        return std::find(marked.begin(), marked.end(), std::make_pair(&one, one.n_tokens)) != marked.end();
    });
}

std::vector<state> copy_states(llama_context * ctx, int32_t seq, const checkpoints & all, const std::vector<int32_t> & sound, bool whole,
                               const std::function<bool(uint32_t, size_t)> & wanted) {
    std::vector<state> found;
    settle(ctx);
    const auto count = (uint32_t) sound.size();
    size_t seen = 0;
    if (whole && ends_after(ctx, seq, count, sound)) {
        ++seen;
        if (has_quick_end(ctx, seq) && wanted(count, llama_state_seq_get_size_ext(ctx, seq, partial))) {
            copy_end(ctx, seq, sound, found);
        }
    }
    for (auto one = all.rbegin(); one != all.rend() && seen < most_states; ++one) {
        // Draft models have states of their own, and are refused.
        const bool within = one->n_tokens > 0 && one->n_tokens <= (int64_t) count;
        const bool fits = within && one->pos_max == position_at(sound, (uint32_t) one->n_tokens) - 1 && !one->data_tgt.empty() &&
                          one->data_dft.empty() && one->data_spec.empty();
        if (!fits || (seen > 0 && whole && one->n_tokens == (int64_t) count)) {
            continue;
        }
        ++seen;
        if (wanted((uint32_t) one->n_tokens, one->data_tgt.size())) {
            found.push_back(copy_of(*one));
        }
    }
    return found;
}

uint32_t goes_on_after(llama_context * ctx, int32_t seq, const checkpoints & all, uint32_t held, uint32_t prompt_tokens,
                       const std::vector<int32_t> & tokens) {
    const llama_pos pos_min = llama_memory_seq_pos_min(llama_get_memory(ctx), seq);
    if (held == 0 || pos_min < 0) {
        return 0;
    }
    const llama_pos next = position_at(tokens, held);
    const llama_pos below = std::max(0, next - llama_model_n_swa(llama_get_model(ctx)) - (held < prompt_tokens ? 0 : 1));
    if (pos_min < below) {
        return held;
    }
    for (auto one = all.rbegin(); one != all.rend(); ++one) {
        if (one->pos_max <= next && (one->pos_min < below || one->pos_min == 0)) {
            const llama_pos at = std::min(next, std::max(one->pos_min + 1, one->pos_max));
            return (uint32_t) std::min<int64_t>(tokens_up_to(tokens, at), one->n_tokens);
        }
    }
    return 0;
}

bool put_state(llama_context * ctx, int32_t seq, checkpoints & all, uint32_t held, uint32_t n_tokens, const std::vector<char> & bytes,
               const std::vector<int32_t> & tokens) {
    state_head head;
    if (!read_head(bytes, n_tokens, head)) {
        return false;
    }
    forget_behind(all, held, tokens);
    common_prompt_checkpoint made;
    made.update_pos(n_tokens, head.least, head.greatest);
    made.data_tgt.assign(bytes.begin() + state_head_bytes, bytes.end());
    const size_t read = llama_state_seq_set_data_ext(ctx, made.data_tgt.data(), made.data_tgt.size(), seq, partial);
    if (read != made.data_tgt.size() || !ends_after(ctx, seq, n_tokens, tokens)) {
        return false;
    }
    all.push_back(std::move(made));
    return true;
}

bool put_windows(llama_context * ctx, int32_t seq, checkpoints & all, uint32_t held, uint32_t n_tokens, const std::vector<window> & windows,
                 const std::vector<int32_t> & tokens) {
    std::string why;
    const auto parts = parts_of(ctx, why);
    if (parts.window == nullptr || windows.empty() || windows.front().first >= n_tokens || windows.back().first + windows.back().rows < n_tokens) {
        return false;
    }
    forget_behind(all, held, tokens);
    const uint32_t first = windows.front().first;
    const auto cells = window_cells(ctx, *parts.window, seq, first, n_tokens - first, tokens);
    if (cells.empty()) {
        return false;
    }
    row_writer copies(ctx);
    for (const auto & one : windows) {
        const uint32_t rows = std::min(one.rows, n_tokens - one.first);
        const char * at = one.bytes.data();
        for (const auto & plane : planes_of(*parts.window, seq, parts.has_v, why)) {
            copies.write(plane, cells.data() + (one.first - first), rows, at);
            at += one.rows*plane.row_bytes;
        }
    }
    return ends_after(ctx, seq, n_tokens, tokens);
}

uint32_t first_window(llama_context * ctx, int32_t seq, uint32_t n_tokens) {
    std::string why;
    const auto parts = parts_of(ctx, why);
    const llama_pos least = parts.window != nullptr ? parts.window->seq_pos_min(seq) : -1;
    const uint32_t first = ((uint32_t) std::max(least, 0) + block_tokens - 1)/block_tokens*block_tokens;
    return least >= 0 && first < n_tokens ? first : UINT32_MAX;
}

} // namespace kvt
