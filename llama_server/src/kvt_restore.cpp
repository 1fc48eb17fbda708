#include "kvt_restore.h"

#include "kvt_blocks.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

namespace kvt {

namespace {

constexpr milliseconds release_timeout { 200 };
uint32_t reason_of(status got) {
    return got == status::late ? shortfall_sidecar_late : got == status::refused ? shortfall_sidecar_error : shortfall_sidecar_away;
}

} // namespace

restorer::restorer(client & look_up, client & waiting, hello said, size_t most_bytes, milliseconds stall)
    : look_up_(look_up), waiting_(waiting), said_(std::move(said)), buffer_bytes_(std::max(room_bytes(said_, block_tokens), page_bytes)),
      most_bytes_(most_bytes), most_stall_(stall) {}

restorer::~restorer() {
    while (!jobs_.empty()) {
        retire(jobs_.begin()->first, true);
    }
    for (auto & one : retired_) {
        one->thread.join();
    }
}

void restorer::begin(int slot, std::vector<int32_t> tokens, uint32_t have, uint32_t held, bool direct) {
    drop(slot);
    reap();
    auto one = std::make_unique<job>();
    one->tokens = std::move(tokens);
    one->have = have;
    one->direct = direct;
    one->written = one->held = one->end = held;
    auto & place = jobs_[slot];
    try {
        one->thread = std::thread([this, at = one.get()] { run(*at); });
    } catch (...) { // there are no more threads
        jobs_.erase(slot);
        throw;
    }
    place = std::move(one);
}

void restorer::drop(int slot) {
    if (busy(slot)) {
        retire(slot, true);
    }
}

size_t restorer::ahead() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return ahead_;
}

void restorer::retire(int slot, bool dropped) {
    auto found = jobs_.find(slot);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        found->second->dropped = found->second->dropped || dropped;
    }
    changed_.notify_all();
    retired_.push_back(std::move(found->second));
    jobs_.erase(found);
}

void restorer::reap() {
    for (auto at = retired_.begin(); at != retired_.end();) {
        std::unique_lock<std::mutex> lock(mutex_);
        const bool ended = (*at)->ended;
        lock.unlock();
        if (ended) {
            (*at)->thread.join();
        }
        at = ended ? retired_.erase(at) : std::next(at);
    }
}

bool restorer::step(int slot, row_sink & sink, steady_clock::time_point until, finished & report) {
    job & one = *jobs_.at(slot);
    std::unique_lock<std::mutex> lock(mutex_);
    bool written = true;
    for (bool any = false; written && has_next(one); any = true) {
        if (any && steady_clock::now() >= until) {
            return false;
        }
        if (one.ready.at(one.shown).direct != nullptr) {
            written = read_round(one, sink, until, lock);
            continue;
        }
        piece next = std::move(one.ready.at(one.shown));
        one.ready.erase(one.shown++);
        lock.unlock();
        const auto began = steady_clock::now();
        written = sink.write(next.first, next.rows, next.block.data(), next.block_rows, next.skip);
        const double seconds = seconds_since(began);
        lock.lock();
        one.spare.push_back(std::move(next.block));
        changed_.notify_all();
        one.report.copy_seconds += seconds;
        one.moved = steady_clock::now();
        if (written) {
            one.written = next.first + next.rows;
            one.report.restored_bytes += block_bytes(said_, next.rows);
        } else {
            one.report.reason = shortfall_no_cells;
        }
    }
    const bool over = one.read || one.shown >= one.last;
    const bool stalled = !over && steady_clock::now() - one.moved > most_stall_;
    if (written && !over && !stalled) {
        return false;
    }
    if (stalled) {
        one.report.reason = shortfall_unreadable;
    }
    if (said_.states && stalled) {
        one.report.restored_bytes = 0; // rows alone are of no use, and the thread may yet write the rest
    } else if (said_.states) {
        lock.unlock();
        resume(one, sink);
        lock.lock();
    } else {
        one.report.restored_tokens = one.written - one.held;
    }
    report.memory_tokens   = one.have;
    report.restored_tokens = one.report.restored_tokens;
    report.restored_bytes  = one.report.restored_bytes;
    report.reason          = one.report.reason;
    report.at              = one.report.at;
    report.lookup_seconds  = one.report.lookup_seconds;
    report.fetch_seconds   = one.report.fetch_seconds;
    report.copy_seconds    = one.report.copy_seconds;
    lock.unlock();
    retire(slot, true);
    return true;
}

void restorer::wait(milliseconds most) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, most, [this] {
        return std::any_of(jobs_.begin(), jobs_.end(), [](const auto & each) { return each.second->read || has_next(*each.second); });
    });
}

// Without memory, or whatever else is thrown, what has come so far is all.
void restorer::run(job & one) noexcept {
    try {
        read(one);
    } catch (const std::exception &) {
        std::lock_guard<std::mutex> lock(mutex_);
        one.state.clear();
        one.windows.clear();
        one.report.reason = shortfall_unreadable;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    one.read = true;
    changed_.notify_all();
    changed_.wait(lock, [&one] { return one.dropped; }); // until then the main loop has use for the buffers
    auto spare = std::exchange(one.spare, {});
    auto ready = std::exchange(one.ready, {});
    auto state = std::exchange(one.state, {});
    auto windows = std::exchange(one.windows, {});
    lock.unlock();
    spare.clear(); // giving memory back takes as long as getting it
    ready.clear();
    state = {};
    windows.clear();
    lock.lock();
    ahead_ -= one.ahead;
    besides_ -= one.beside ? 1 : 0;
    one.ended = true;
    changed_.notify_all();
}

void restorer::read(job & one) {
    look_up_.wait_first(lookup_timeout);
    const auto began = steady_clock::now();
    matched found;
    status got = status::ok;
    // as the sidecar would say: a resident hit does not ask
    if (one.tokens.size() < (size_t) one.have + 1 + look_up_.greeting().min_tokens) {
        found.reason = shortfall_too_short;
    } else if (!dropped(one)) {
        got = look_up_.match(one.tokens.data(), one.tokens.size(), one.have, one.have, {}, lookup_timeout, found);
    }
    if (got == status::ok && found.pending) {
        look_up_.release(found.lease_id, release_timeout);
        fetched(one, began);
        return;
    }
    answered(one, got, found, began);
    if (got == status::ok) {
        read_named(one, look_up_, found);
    }
}

// Reads what has to be fetched first. Prompts take turns; one that nobody wants any more gives up its own.
void restorer::fetched(job & one, steady_clock::time_point began) {
    const turn mine(*this, one, began + milliseconds(most_wait_ms));
    matched found;
    status got = status::late;
    if (mine.has) {
        waiting_.wait_first(lookup_timeout);
        got = waiting_.match(one.tokens.data(), one.tokens.size(), one.have, one.have, {}, lookup_timeout, found);
        if (got == status::ok && found.pending) {
            const uint32_t most = std::min<uint32_t>(most_wait_ms, 200 + 2*std::min(found.expected_ms, most_wait_ms));
            got = waiting_.wait(found.lease_id, milliseconds(most), found);
        }
    }
    answered(one, got, found, began);
    if (got == status::ok) {
        read_named(one, waiting_, found);
    }
}

restorer::turn::turn(restorer & its, job & one, steady_clock::time_point latest) : of(its) {
    std::unique_lock<std::mutex> lock(of.mutex_);
    of.changed_.wait_until(lock, latest, [&] { return one.dropped || !of.fetching_; });
    has = !one.dropped && !of.fetching_;
    of.fetching_ = of.fetching_ || has;
}

restorer::turn::~turn() {
    if (has) {
        std::lock_guard<std::mutex> lock(of.mutex_);
        of.fetching_ = false;
        of.changed_.notify_all();
    }
}

bool restorer::dropped(const job & one) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return one.dropped;
}

void restorer::answered(job & one, status got, const matched & found, steady_clock::time_point began) {
    std::lock_guard<std::mutex> lock(mutex_);
    one.report.lookup_seconds = seconds_since(began);
    one.report.reason = got == status::ok ? found.reason : reason_of(got);
    one.report.at = found.at;
}

void restorer::read_named(job & one, client & from, const matched & found) {
    lease held(from, found.lease_id);
    if (read_end(one, held, found)) {
        read_files(one, held, found);
    }
    held.release();
}

} // namespace kvt
