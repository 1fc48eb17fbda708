#include "kvt_saving.h"

#include "kvt_blocks.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <utility>

namespace kvt {

namespace {

constexpr size_t most_reports = 64;
constexpr size_t most_jobs = 64;

} // namespace

saver::saver(const client & store, hello said, std::function<void()> wake, size_t most_kept, milliseconds stall)
    : own_(std::make_shared<saving>(store.shared(), std::move(said), std::move(wake), most_kept, stall)) {
    own_->start();
}

saver::~saver() { own_->end(); }

void saver::add(int slot, std::vector<int32_t> tokens, std::vector<state> states, uint32_t windows) {
    own_->add(slot, std::move(tokens), std::move(states), windows);
}

ahead saver::add_ahead(int slot, std::vector<int32_t> tokens, uint32_t first, row_source & rows, steady_clock::time_point until) {
    return own_->add_ahead(slot, std::move(tokens), first, rows, until);
}

std::vector<fingerprint> saver::fingerprints(int slot, const std::vector<int32_t> & tokens) const { return own_->fingerprints(slot, tokens); }

void saver::restored(int slot, const std::vector<int32_t> & tokens, std::vector<fingerprint> fingerprints) {
    own_->restored(slot, tokens, std::move(fingerprints));
}

size_t saver::room() const { return own_->room(); }

bool saver::has_state(int slot, const std::vector<int32_t> & tokens, uint32_t n_tokens) const {
    return own_->has_state(slot, tokens, n_tokens);
}

void saver::step(row_source & rows, steady_clock::time_point until) { own_->step(rows, until); }

bool saver::keep(int slot, uint32_t from, row_source & rows, steady_clock::time_point until) {
    return own_->keep(slot, from, rows, until);
}

void saver::lose(int slot, uint32_t from) { own_->lose(slot, from); }

void saver::report(const finished & request) { own_->report(request); }

uint64_t saver::written_blocks() const { return own_->written_blocks(); }

size_t saver::jobs() const { return own_->jobs(); }

saving::saving(std::shared_ptr<connection> store, hello said, std::function<void()> wake, size_t most_kept, milliseconds stall)
    : store_(std::move(store)), said_(std::move(said)), wake_(std::move(wake)), most_kept_(most_kept), most_stall_(stall) {}

void saving::start() {
    thread_.start([self = shared_from_this()] { self->run(); });
}

void saving::end() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ending_ = true;
    }
    changed_.notify_all();
    thread_.leave();
}

// The disk does, to which the thread writes: what waits for it gives back its memory, and nothing more is taken.
bool saving::hangs() {
    if (!writing_.has_value() || steady_clock::now() - *writing_ <= most_stall_ || jobs_.empty()) {
        return false;
    }
    while (jobs_.size() > 1) {
        give_back(*jobs_.back(), true);
        jobs_.pop_back();
    }
    give_back(*jobs_.front(), false); // the thread reads its states
    jobs_.front()->resident = 0;
    return true;
}

void saving::add(int slot, std::vector<int32_t> tokens, std::vector<state> states, uint32_t windows) {
    if (!store_->stands() || tokens.empty()) {
        return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (hangs() || jobs_.size() >= most_jobs) {
        return;
    }
    const auto one = job_of(slot, std::move(tokens));
    one->windows = windows;
    size_t bytes = 0;
    for (auto & each : states) {
        if (kept_bytes_ + bytes + each.bytes.size() <= most_kept_ && one->states.count(each.n_tokens) == 0) {
            bytes += each.bytes.size();
            one->states[each.n_tokens] = std::move(each.bytes);
        }
    }
    jobs_.push_back(one);
    kept_bytes_ += bytes; // when nothing can be thrown any more
    changed_.notify_all();
}

std::shared_ptr<saving::job> saving::job_of(int slot, std::vector<int32_t> tokens) const {
    auto one = std::make_shared<job>();
    one->slot = slot;
    one->fingerprints = known(slot, tokens);
    one->resident = (uint32_t) tokens.size();
    const auto before = last_.find(slot);
    if (before != last_.end()) {
        one->turn = before->second.turn;
        const auto & all = before->second.states;
        one->stored_states.insert(all.begin(), all.upper_bound(lasting(before->second, tokens)));
    }
    one->tokens = std::move(tokens);
    return one;
}

std::vector<fingerprint> saving::fingerprints(int slot, const std::vector<int32_t> & tokens) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return known(slot, tokens);
}

std::vector<fingerprint> saving::known(int slot, const std::vector<int32_t> & tokens) const {
    const auto found = last_.find(slot);
    if (found == last_.end()) {
        return {};
    }
    auto all = found->second.fingerprints;
    all.resize(std::min<size_t>(all.size(), common_prefix(found->second.tokens, tokens)/block_tokens));
    return all;
}

void saving::restored(int slot, const std::vector<int32_t> & tokens, std::vector<fingerprint> fingerprints) {
    std::lock_guard<std::mutex> lock(mutex_);
    past & own = last_[slot];
    own.states.erase(own.states.upper_bound(lasting(own, tokens)), own.states.end());
    own.fingerprints.clear();
    own.tokens = tokens;
    ++own.turn;
    own.fingerprints = std::move(fingerprints);
}

// The slot's rows from there on go.
void saving::forget_rows(int slot, uint32_t from) noexcept {
    const auto found = last_.find(slot);
    if (found != last_.end()) {
        past & own = found->second;
        own.fingerprints.resize(std::min<size_t>(own.fingerprints.size(), from/block_tokens));
        own.states.erase(own.states.upper_bound(from), own.states.end());
    }
}

void saving::step(row_source & rows, steady_clock::time_point until) {
    bool more = false;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (wants_.empty()) {
            return;
        }
        bool any = false;
        for (auto one = wants_.begin(); one != wants_.end() && !more; ++one) {
            if (!one->served) {
                more = (any && steady_clock::now() >= until) || !serve(*one, rows, until);
                any = true;
            }
        }
    }
    if (more) {
        wake_();
    } else {
        changed_.notify_all();
    }
}

// Without memory, or whatever else is thrown, the block is not stored.
bool saving::serve(want & one, row_source & rows, steady_clock::time_point until) {
    try {
        return read(one, rows, until);
    } catch (const std::exception &) {
        one.block = {};
        one.served = true;
        return true;
    }
}

// False if it was time to stop before the block was whole, or with the block if it was the last.
bool saving::read(want & one, row_source & rows, steady_clock::time_point until) {
    job & of = *jobs_.front();
    if (one.window) {
        one.block = buffer((size_t) one.rows*said_.window_row_bytes);
        const size_t segment = segment_bytes(said_, 1).size();
        if (one.first + one.rows > of.resident || !rows.read(of.slot, of.tokens, one.first, one.rows, segment, one.block.data())) {
            one.block = {};
        }
        one.served = true;
        return true;
    }
    const auto sizes = segment_bytes(said_, one.rows);
    if (take_kept(of, one)) {
        return true;
    }
    if (one.first + one.rows > of.resident) {
        one.block = {}; // also if it was half read: the rest is gone
        one.segments = sizes.size();
    } else if (one.segments == 0) {
        one.block = buffer(block_bytes(said_, one.rows));
    }
    while (one.segments < sizes.size()) {
        if (!rows.read(of.slot, of.tokens, one.first, one.rows, one.segments, one.block.data() + one.bytes)) {
            one.block = {};
            break;
        }
        one.bytes += sizes[one.segments++];
        if (steady_clock::now() >= until && one.segments < sizes.size()) {
            return false;
        }
    }
    one.served = true;
    return true;
}

bool saving::keep(int slot, uint32_t from, row_source & rows, steady_clock::time_point until) {
    std::lock_guard<std::mutex> lock(mutex_);
    hangs();
    forget_rows(slot, from);
    return std::all_of(jobs_.begin(), jobs_.end(), [&](const auto & one) {
        return one->slot != slot || one->resident <= from || keep_of(*one, from, rows, until);
    });
}

void saving::lose(int slot, uint32_t from) {
    std::lock_guard<std::mutex> lock(mutex_);
    forget_rows(slot, from);
    for (const auto & one : jobs_) {
        if (one->slot == slot) {
            one->resident = std::min(one->resident, from/block_tokens*block_tokens);
        }
    }
}

// Until it has all, the thread may go on with the slot's own rows.
bool saving::keep_of(job & one, uint32_t from, row_source & rows, steady_clock::time_point until) {
    uint32_t first = std::max<uint32_t>(from, (uint32_t) one.fingerprints.size()*block_tokens)/block_tokens*block_tokens;
    for (const uint32_t end = one.resident; first < end;) {
        const uint32_t count = block_end(first, one.tokens.size()) - first;
        if (one.kept.count(first) == 0) {
            if (steady_clock::now() >= until) {
                return false;
            }
            buffer block = copied(one, first, count, rows);
            if (block.empty()) {
                break;
            }
            const size_t bytes = block.size();
            one.kept[first] = std::move(block);
            kept_bytes_ += bytes;
        }
        first += count;
    }
    one.resident = std::min(one.resident, from/block_tokens*block_tokens);
    return true;
}

// Empty if there is no room or no memory, or the rows are gone.
buffer saving::copied(const job & one, uint32_t first, uint32_t count, row_source & rows) const try {
    const auto sizes = segment_bytes(said_, count);
    const size_t bytes = block_bytes(said_, count);
    if (kept_bytes_ + bytes > most_kept_) {
        return {};
    }
    buffer block(bytes);
    char * at = block.data();
    for (size_t i = 0; i < sizes.size(); at += sizes[i++]) {
        if (!rows.read(one.slot, one.tokens, first, count, i, at)) {
            return {};
        }
    }
    return block;
} catch (const std::exception &) {
    return {};
}

void saving::report(const finished & request) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (reports_.size() < most_reports) {
        reports_.push_back(request);
    }
    changed_.notify_all();
}

size_t saving::room() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return most_kept_ - std::min(most_kept_, kept_bytes_);
}

uint64_t saving::written_blocks() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return written_;
}

// What is copied of its rows, and its states.
void saving::give_back(job & one, bool states) noexcept {
    for (const auto & block : one.kept) {
        kept_bytes_ -= block.second.size();
    }
    one.kept.clear();
    for (const auto & each : one.states) {
        kept_bytes_ -= states ? each.second.size() : 0;
    }
    if (states) {
        one.states.clear();
    }
}

} // namespace kvt
