// The saver's part in a request that is still computed: what it has so far is copied aside in the main loop, and stored by the
// thread alone. The main loop may be away for as long as a batch takes, and the thread does not wait for it.
#include "kvt_saving.h"

#include "kvt_blocks.h"

#include <algorithm>
#include <utility>

namespace kvt {

namespace {

constexpr size_t most_jobs_ahead = 32;

} // namespace

ahead saving::add_ahead(int slot, std::vector<int32_t> tokens, uint32_t first, row_source & rows, steady_clock::time_point until) {
    const auto whole = (uint32_t) (tokens.size()/block_tokens*block_tokens);
    ahead got { first, false };
    if (!store_->stands() || first >= whole) {
        return got;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (hangs() || jobs_.size() >= most_jobs_ahead) {
        return got;
    }
    tokens.resize(whole);
    const auto one = job_of(slot, std::move(tokens));
    const size_t bytes = block_bytes(said_, block_tokens);
    size_t taken = 0;
    while (got.handed < whole && kept_bytes_ + taken + bytes <= most_kept_/2) {
        if (taken > 0 && steady_clock::now() >= until) {
            got.more = true;
            break;
        }
        buffer block = copied(*one, got.handed, block_tokens, rows);
        if (block.empty()) {
            break;
        }
        one->kept[got.handed] = std::move(block);
        taken += bytes;
        got.handed += block_tokens;
    }
    if (taken > 0) {
        one->tokens.resize(got.handed);
        one->resident = got.handed;
        jobs_.push_back(one);
        kept_bytes_ += taken; // when nothing can be thrown any more
        changed_.notify_all();
    }
    return got;
}

// A block that was copied aside is had without the main loop.
bool saving::take_kept(job & of, want & one) noexcept {
    const auto kept = one.window ? of.kept.end() : of.kept.find(one.first);
    if (kept == of.kept.end()) {
        return false;
    }
    kept_bytes_ -= kept->second.size();
    one.block = std::move(kept->second);
    of.kept.erase(kept);
    one.served = true;
    return true;
}

size_t saving::jobs() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return jobs_.size();
}

} // namespace kvt
