// llama-server's checkpoints as states of the store, and back. A checkpoint is what llama.cpp writes of a sequence with
// LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: recurrent states, or the rows of windows. Used in the thread that decodes.
#pragma once

#include "kvt_states.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <utility>
#include <vector>

struct common_prompt_checkpoint;
struct llama_context;

namespace kvt {

using checkpoints = std::list<common_prompt_checkpoint>;

// Whether the sequence's memory ends with the first `n_tokens` of these, and a state of it is one after them.
bool ends_after(llama_context * ctx, int32_t seq, uint32_t n_tokens, const std::vector<int32_t> & tokens);

// Checkpoints behind the first `held` tokens of a prompt that a slot has got: those of its old prompt. llama-server leaves
// one there that ends one token later, though the token there is another one now.
using marks = std::vector<std::pair<const common_prompt_checkpoint *, int64_t>>;
marks marks_behind(const checkpoints & all, uint32_t held);
void forget(checkpoints & all, const marks & marked);

// The last states of a slot that holds these tokens, all of them sound, as far as `wanted` says so, which is asked with the number
// of tokens and the bytes. `whole`: the slot holds nothing but these tokens; then its end is a checkpoint, too, which
// llama-server itself does not make.
std::vector<state> copy_states(llama_context * ctx, int32_t seq, const checkpoints & all, const std::vector<int32_t> & sound, bool whole,
                               const std::function<bool(uint32_t, size_t)> & wanted);

// After how many tokens llama-server would go on by itself, if the slot holds the first `held` of a prompt, which begins with `tokens`.
uint32_t goes_on_after(llama_context * ctx, int32_t seq, const checkpoints & all, uint32_t held, uint32_t prompt_tokens,
                       const std::vector<int32_t> & tokens);

// Puts a state into the memory of the sequence, whose rows are there, and among the checkpoints, of which those behind `held`
// tokens belong to another prompt and go. False: the memory of the sequence is in no known state.
bool put_state(llama_context * ctx, int32_t seq, checkpoints & all, uint32_t held, uint32_t n_tokens, const std::vector<char> & bytes,
               const std::vector<int32_t> & tokens);

// Puts windows before `n_tokens` into the cache of the sequence's sliding windows, instead of all that it held. False: the
// memory of the sequence is in no known state.
bool put_windows(llama_context * ctx, int32_t seq, checkpoints & all, uint32_t held, uint32_t n_tokens, const std::vector<window> & windows,
                 const std::vector<int32_t> & tokens);

// The first block from which on the windows of all of these tokens are held; UINT32_MAX if there is none.
uint32_t first_window(llama_context * ctx, int32_t seq, uint32_t n_tokens);

} // namespace kvt
