// The saver's thread: asks which blocks are missing, has them from the main loop, and writes them.
#include "kvt_saving.h"

#include "kvt_blocks.h"
#include "kvt_file.h"
#include "kvt_images.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <utility>

namespace kvt {

namespace {

constexpr milliseconds store_timeout { 5000 };
constexpr milliseconds connect_nap { 50 };
constexpr int connect_naps = 40;
constexpr milliseconds later_nap { 250 };
constexpr std::chrono::minutes most_later { 5 }; // what a large model takes to be checked
constexpr size_t batch_bytes = 16u << 20;
constexpr size_t most_files = 64;
constexpr size_t most_windows = 4096; // docs/engine-protocol.md

} // namespace

saving::write::write(saving & its) : of(its) {
    std::lock_guard<std::mutex> lock(of.mutex_);
    of.writing_ = steady_clock::now();
}

saving::write::~write() {
    std::lock_guard<std::mutex> lock(of.mutex_);
    of.writing_.reset();
}

void saving::run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] { return ending_ || !jobs_.empty() || !reports_.empty(); });
        if (ending_) {
            return;
        }
        std::list<finished> reports;
        reports.swap(reports_);
        auto one = jobs_.empty() ? nullptr : jobs_.front();
        lock.unlock();
        try {
            // A first answer may be over before the sidecar has said hello. No look-up waits for reports.
            const bool told = !reports.empty() && store_->stands() && connected();
            for (const auto & request : reports) {
                if (told) {
                    store_->finish(request, store_timeout);
                }
            }
            if (one != nullptr) {
                store(one);
            }
        } catch (const std::exception &) { // for instance there is no memory: it is not stored
            store_->hang_up(); // somewhere within a call
        }
        lock.lock();
        wants_.clear();
        if (one != nullptr) {
            forget(*one);
            jobs_.pop_front();
            lock.unlock();
            one.reset(); // giving memory back may take longer than the main loop should wait
            lock.lock();
        }
    }
}

void saving::forget(const job & one) noexcept {
    for (const auto & block : one.kept) {
        kept_bytes_ -= block.second.size();
    }
    for (const auto & each : one.states) {
        kept_bytes_ -= each.second.size();
    }
    try {
        know(one);
    } catch (const std::exception &) { // without memory nothing is known of it
        last_.erase(one.slot);
    }
}

// What the slot holds of the job's rows. If others were restored since, they are known, and these may add to them.
void saving::know(const job & one) {
    auto fingerprints = one.fingerprints;
    fingerprints.resize(std::min<size_t>(fingerprints.size(), std::min<size_t>(one.resident, one.tokens.size())/block_tokens));
    past & own = last_[one.slot];
    if (own.turn != one.turn) {
        const bool same = common_prefix(own.tokens, one.tokens)/block_tokens >= fingerprints.size() && fingerprints.size() > own.fingerprints.size() &&
                          std::equal(own.fingerprints.begin(), own.fingerprints.end(), fingerprints.begin());
        if (same) {
            own.fingerprints = std::move(fingerprints);
        }
        return;
    }
    own.fingerprints.clear();
    own.states.clear();
    own.tokens = one.tokens;
    own.fingerprints = std::move(fingerprints);
    own.states.insert(one.stored_states.begin(), one.stored_states.upper_bound(one.resident));
}

// After hang_up() it takes a moment.
bool saving::connected() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (int i = 0; i < connect_naps && !store_->up() && !ending_; ++i) {
        changed_.wait_for(lock, connect_nap, [this] { return ending_; });
    }
    return store_->up() && !ending_;
}

// The model's file is being checked: what is to be stored waits meanwhile. False if that takes too long; then what comes
// after it asks only once.
bool saving::later(steady_clock::time_point latest) {
    if (!patient_) {
        return false;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, later_nap, [this] { return ending_; });
    patient_ = steady_clock::now() < latest;
    return patient_ && !ending_;
}

void saving::store(const std::shared_ptr<job> & one) {
    const auto latest = steady_clock::now() + most_later;
    const size_t most_bytes = std::max<size_t>(block_bytes(said_, block_tokens), (size_t) block_tokens*said_.window_row_bytes);
    const size_t fit = batch_bytes/std::max<size_t>(most_bytes, 1);
    const uint32_t most = (uint32_t) std::clamp<size_t>(fit, 1, most_files);
    std::vector<uint32_t> windows;
    for (size_t first = one->windows; first < one->tokens.size() && windows.size() < most_windows; first += block_tokens) {
        windows.push_back((uint32_t) first);
    }
    auto offers = offers_of(*one, !windows.empty());
    const auto extras = extras_of(one->tokens, one->tokens.size());
    {
        std::lock_guard<std::mutex> lock(mutex_);
        auto all = known(one->slot, one->tokens); // by jobs before this one, which have ended since
        if (all.size() > one->fingerprints.size()) {
            one->fingerprints = std::move(all);
        }
    }
    for (bool more = true; more && connected();) {
        planned plan;
        const status got = store_->plan(one->tokens.data(), one->tokens.size(), most, extras, offers, windows, one->fingerprints, store_timeout, plan);
        if (got != status::ok) {
            return;
        }
        if (plan.outcome == plan_outcome::later) {
            if (later(latest)) {
                continue;
            }
            return;
        }
        patient_ = true;
        if (plan.outcome == plan_outcome::all) {
            note_present(*one, offers, plan);
        }
        const auto files = fill_all(one, plan);
        std::vector<std::string> reasons;
        if (!files.empty() && store_->commit(files, store_timeout, reasons) != status::ok) {
            store_->hang_up(); // as below
            return;
        }
        size_t stored = 0;
        while (stored < reasons.size() && reasons[stored].empty()) {
            const reserved & named = plan.files[stored++];
            std::lock_guard<std::mutex> lock(mutex_);
            ++written_;
            one->read.erase(named.kind == file_kind::rows ? named.first_position : UINT32_MAX);
            if (named.kind == file_kind::state) {
                one->stored_states.insert(named.first_position);
            }
        }
        if (stored < files.size()) {
            store_->hang_up(); // what was refused may still be reserved
            return;
        }
        if (files.size() < plan.files.size()) {
            store_->hang_up(); // gives back what was reserved and is not filled
            if (plan.files[files.size()].kind != file_kind::window || windows.empty()) {
                return;
            }
            windows.clear(); // the slot has them no more; the states wait here
            offers = offers_of(*one, false);
            continue;
        }
        more = plan.outcome == plan_outcome::more && !files.empty();
        if (plan.outcome == plan_outcome::fingerprints) {
            one->read.clear(); // all of it is stored, or others store it
            more = read_more(one, most);
        }
    }
}

// The next blocks, and so their fingerprints. False if there are none, or the slot has lost them.
bool saving::read_more(const std::shared_ptr<job> & one, uint32_t most) {
    std::vector<want> wants;
    const size_t count = one->tokens.size();
    for (size_t first = one->fingerprints.size()*block_tokens; first < count && wants.size() < most; first += block_tokens) {
        wants.emplace_back();
        wants.back().first = (uint32_t) first;
        wants.back().rows = block_end((uint32_t) first, count) - (uint32_t) first;
    }
    auto had = fetch(std::move(wants));
    size_t read = 0;
    while (read < had.size() && !had[read].block.empty()) {
        want & each = had[read++];
        const fingerprint its = fingerprint_of(each.block.data(), segment_bytes(said_, each.rows));
        one->read[each.first] = std::move(each.block);
        std::lock_guard<std::mutex> lock(mutex_);
        one->fingerprints.push_back(its);
    }
    return read > 0;
}

// The first of the files, up to one that cannot be filled: what comes after it would have nothing to go on from.
std::vector<filled> saving::fill_all(const std::shared_ptr<job> & one, const planned & plan) {
    auto blocks = fetch(missing(*one, plan.files));
    auto next = blocks.begin();
    std::vector<filled> files;
    for (const reserved & named : plan.files) {
        filled done;
        const write mine(*this);
        if (named.kind == file_kind::state) {
            if (!fill_state(*one, named, done)) {
                break;
            }
        } else {
            const auto read = one->read.find(named.first_position);
            const bool here = named.kind == file_kind::rows && read != one->read.end();
            if ((!here && next == blocks.end()) || !fill(*one, named, here ? read->second : (next++)->block, done)) {
                break;
            }
        }
        files.push_back(std::move(done));
    }
    return files;
}

// What of these files is to be read from the slot: windows, and blocks that were known and are stored no more. Up to one that
// is no block of these tokens.
std::vector<saving::want> saving::missing(const job & one, const std::vector<reserved> & files) const {
    std::vector<want> wants;
    for (const auto & named : files) {
        const uint64_t end = (uint64_t) named.first_position + named.rows;
        if (named.kind == file_kind::state) {
            continue;
        }
        if (named.rows == 0 || end > one.tokens.size() || end != block_end(named.first_position, one.tokens.size())) {
            break;
        }
        if (named.kind == file_kind::rows && one.read.count(named.first_position) > 0) {
            continue;
        }
        wants.emplace_back();
        wants.back().first = named.first_position;
        wants.back().rows = named.rows;
        wants.back().window = named.kind == file_kind::window;
    }
    return wants;
}

std::vector<saving::want> saving::fetch(std::vector<want> wants) {
    if (wants.empty()) {
        return wants;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    for (auto & each : wants) {
        take_kept(*jobs_.front(), each);
    }
    if (std::all_of(wants.begin(), wants.end(), [](const want & each) { return each.served; })) {
        return wants;
    }
    wants_ = std::move(wants);
    if (!ending_) {
        lock.unlock(); // the main loop may hold what this waits for, and want the lock; end() waits for the thread
        wake_();
        lock.lock();
    }
    changed_.wait(lock, [this] {
        return ending_ || std::all_of(wants_.begin(), wants_.end(), [](const want & each) { return each.served; });
    });
    auto had = std::exchange(wants_, {});
    for (auto & each : had) {
        if (!each.served) {
            each.block = {}; // at the end it may be half read
        }
    }
    return had;
}

bool saving::fill(const job & one, const reserved & named, const buffer & block, filled & done) const {
    const size_t index = named.first_position/block_tokens;
    if (block.empty() || named.kind == file_kind::window) {
        return !block.empty() && write_state(named, block.data(), block.size(), done);
    }
    // Rows that were known, and then read again, are those that the file was made for, or none.
    return block.size() == block_bytes(said_, named.rows) && index < one.fingerprints.size() &&
           write_segments(named, block.data(), segment_bytes(said_, named.rows), done) && fingerprint_of(done.crcs) == one.fingerprints[index];
}

} // namespace kvt
