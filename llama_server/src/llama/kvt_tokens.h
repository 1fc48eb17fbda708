// llama-server's lists of tokens as ours, where an image's rows have numbers of their own (kvt_images.h). Included by
// server-context.cpp alone.
#pragma once

#include "kvt_images.h"
#include "kvt_named.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvt {

constexpr size_t most_extras = 1024; // docs/engine-protocol.md

// The tokens before the first sound, or image that cannot be told from others.
inline std::vector<int32_t> tokens_of(const server_tokens & all) {
    std::vector<int32_t> tokens;
    tokens.reserve(all.size());
    size_t images = 0;
    while (tokens.size() < all.size()) {
        if (all[tokens.size()] != LLAMA_TOKEN_NULL) {
            tokens.push_back(all[tokens.size()]);
            continue;
        }
        const int32_t first = ++images <= most_extras ? number_of_chunk(all.find_chunk(tokens.size()).get()) : 0;
        if (first == 0) {
            break;
        }
        tokens.push_back(first);
        tokens.insert(tokens.end(), rows_at(tokens, tokens.size() - 1) - 1, number_after(first));
    }
    return tokens;
}

// Adds the first tokens of a request, which `tokens` has as ours, up to `count` of them in all, and of an image all or nothing.
inline void add_tokens(server_tokens & to, const server_tokens & of, const std::vector<int32_t> & tokens, uint32_t count) {
    while (to.size() < count) {
        const size_t at = to.size();
        if (tokens[at] >= 0) {
            to.push_back(tokens[at]);
        } else if (at + rows_at(tokens, at) <= count) {
            to.push_back(of.find_chunk(at).get());
        } else {
            return;
        }
    }
}

} // namespace kvt
