// The saver's thread: asks which blocks are missing, has them from the main loop, and writes them.
#include "kvt_saving.h"

#include "kvt_blocks.h"
#include "kvt_file.h"

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
            for (const auto & request : reports) {
                look_up_->finish(request, lookup_timeout);
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
        last_[one.slot] = { one.tokens, one.done, one.stored_states };
    } catch (const std::exception &) { // without memory nothing is known of it
        last_.erase(one.slot);
    }
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
    for (bool more = true; more && connected();) {
        planned plan;
        if (store_->plan(one->tokens.data(), one->tokens.size(), most, {}, offers, store_timeout, plan, windows) != status::ok) {
            return;
        }
        if (plan.outcome == 4) {
            if (later(latest)) {
                continue;
            }
            return;
        }
        patient_ = true;
        more = plan.outcome == 1;
        const bool rows_left = !plan.files.empty() && plan.files[0].kind == file_kind::rows;
        if (rows_left || plan.outcome == 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            one->done = rows_left ? plan.files[0].first_position : (uint32_t) one->tokens.size();
        }
        if (plan.outcome == 0) {
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
            if (named.kind == file_kind::rows) {
                one->done = named.first_position + named.rows;
            } else if (named.kind == file_kind::state) {
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
            more = true;
            continue;
        }
        more = more && !files.empty();
    }
}

// The first of the files, up to one that cannot be filled: what comes after it would have nothing to go on from.
std::vector<filled> saving::fill_all(const std::shared_ptr<job> & one, const planned & plan) {
    const auto blocks = fetch(one, plan.files);
    std::vector<filled> files;
    for (size_t i = 0; i < plan.files.size(); ++i) {
        const reserved & named = plan.files[i];
        filled done;
        const write mine(*this);
        if (!(named.kind == file_kind::state ? fill_state(*one, named, done) : i < blocks.size() && fill(named, blocks[i].block, done))) {
            break;
        }
        files.push_back(std::move(done));
    }
    return files;
}

std::vector<saving::want> saving::fetch(const std::shared_ptr<job> & one, const std::vector<reserved> & files) {
    std::vector<want> wants;
    for (const auto & named : files) {
        const uint64_t end = (uint64_t) named.first_position + named.rows;
        if (named.rows == 0 || end > one->tokens.size() || end != block_end(named.first_position, one->tokens.size())) {
            break; // not a block of these tokens
        }
        wants.emplace_back();
        wants.back().first = named.first_position;
        wants.back().rows = named.rows;
        wants.back().window = named.kind == file_kind::window;
    }
    if (wants.empty()) {
        return wants;
    }
    std::unique_lock<std::mutex> lock(mutex_);
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

bool saving::fill(const reserved & named, const buffer & block, filled & done) const {
    if (block.empty() || named.kind == file_kind::window) {
        return !block.empty() && write_state(named, block.data(), block.size(), done);
    }
    return write_segments(named, block.data(), segment_bytes(said_, named.rows), done);
}

} // namespace kvt
