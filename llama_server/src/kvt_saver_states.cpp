// The saver's part in states: which are stored already, and which the windows make needless.
#include "kvt_saving.h"

#include <algorithm>

namespace kvt {

bool saving::has_state(int slot, const std::vector<int32_t> & tokens, uint32_t n_tokens) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = last_.find(slot);
    return found != last_.end() && found->second.states.count(n_tokens) > 0 && n_tokens <= lasting(found->second, tokens);
}

// Up to where states of a job before serve these tokens, too. A state hangs on a block: on the last one of the job before,
// which is not whole, it goes when a longer one takes its place, and from where the tokens differ these have other blocks.
uint32_t saving::lasting(const past & before, const std::vector<int32_t> & tokens) {
    const uint32_t same = common_prefix(before.tokens, tokens);
    const bool all = same == before.tokens.size() && same == tokens.size();
    return all ? same : same/block_tokens*block_tokens;
}

// Without the states that the windows make needless. These take the slot to a position only with `window_least` rows before
// it: a short conversation has all its rows, and needs a state.
std::vector<state_offer> saving::offers_of(const job & one, bool windows) const {
    std::vector<state_offer> offers;
    for (const auto & each : one.states) {
        if (!windows || each.first < (uint64_t) one.windows + said_.window_least) {
            offers.push_back({ each.first, each.second.size() });
        }
    }
    return offers;
}

// States that were offered and are not wanted are there.
void saving::note_present(job & one, const std::vector<state_offer> & offers, const planned & plan) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto & each : offers) {
        const bool wanted = std::any_of(plan.files.begin(), plan.files.end(), [&](const reserved & named) {
            return named.kind == file_kind::state && named.first_position == each.n_tokens;
        });
        if (!wanted) {
            one.stored_states.insert(each.n_tokens);
        }
    }
}

bool saving::fill_state(const job & one, const reserved & named, filled & done) {
    const auto found = one.states.find(named.first_position);
    return found != one.states.end() && write_state(named, found->second.data(), found->second.size(), done);
}

} // namespace kvt
