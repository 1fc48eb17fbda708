#include "kvt_saver.h"

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
constexpr int later_naps = 1200; // five minutes: what a large model takes to be checked
constexpr size_t batch_bytes = 16u << 20;
constexpr size_t most_files = 64;
constexpr size_t most_reports = 64;
constexpr size_t most_jobs = 64;
constexpr size_t most_windows = 4096; // docs/engine-protocol.md

} // namespace

saver::saver(client & store, client & look_up, hello said, std::function<void()> wake, size_t most_kept)
    : store_(store), look_up_(look_up), said_(std::move(said)), wake_(std::move(wake)), most_kept_(most_kept),
      thread_([this] { run(); }) {}

saver::~saver() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void saver::add(int slot, std::vector<int32_t> tokens, uint32_t stored, std::vector<state> states, uint32_t windows) {
    if (!store_.stands() || tokens.empty()) {
        return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (jobs_.size() >= most_jobs) {
        return;
    }
    auto one = std::make_shared<job>();
    one->slot = slot;
    one->done = std::min(std::max(stored, known(slot, tokens)), (uint32_t) tokens.size());
    one->resident = (uint32_t) tokens.size();
    one->windows = windows;
    const auto before = last_.find(slot);
    if (before != last_.end()) {
        const auto & all = before->second.states;
        one->stored_states.insert(all.begin(), all.upper_bound(lasting(before->second, tokens)));
    }
    for (auto & each : states) {
        if (kept_bytes_ + each.bytes.size() <= most_kept_) {
            kept_bytes_ += each.bytes.size();
            one->states[each.n_tokens] = std::move(each.bytes);
        }
    }
    one->tokens = std::move(tokens);
    jobs_.push_back(std::move(one));
    changed_.notify_all();
}

// Of these tokens, how many the last job of the slot has stored.
uint32_t saver::known(int slot, const std::vector<int32_t> & tokens) const {
    const auto found = last_.find(slot);
    if (found == last_.end()) {
        return 0;
    }
    return std::min(found->second.done, common_prefix(found->second.tokens, tokens));
}

void saver::step(row_source & rows, steady_clock::time_point until) {
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
bool saver::serve(want & one, row_source & rows, steady_clock::time_point until) {
    try {
        return read(one, rows, until);
    } catch (const std::exception &) {
        one.block = {};
        one.served = true;
        return true;
    }
}

// False if it was time to stop before the block was whole, or with the block if it was the last.
bool saver::read(want & one, row_source & rows, steady_clock::time_point until) {
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
    const auto kept = of.kept.find(one.first);
    if (kept != of.kept.end()) {
        kept_bytes_ -= kept->second.size();
        one.block = std::move(kept->second);
        of.kept.erase(kept);
        one.segments = sizes.size();
    } else if (one.first + one.rows > of.resident) {
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

bool saver::keep(int slot, uint32_t from, row_source & rows, steady_clock::time_point until) {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::all_of(jobs_.begin(), jobs_.end(), [&](const auto & one) {
        return one->slot != slot || one->resident <= from || keep_of(*one, from, rows, until);
    });
}

void saver::lose(int slot, uint32_t from) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto & one : jobs_) {
        if (one->slot == slot) {
            one->resident = std::min(one->resident, from/block_tokens*block_tokens);
        }
    }
}

// Until it has all, the thread may go on with the slot's own rows.
bool saver::keep_of(job & one, uint32_t from, row_source & rows, steady_clock::time_point until) {
    uint32_t first = std::max(from, one.done)/block_tokens*block_tokens;
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
            kept_bytes_ += block.size();
            one.kept[first] = std::move(block);
        }
        first += count;
    }
    one.resident = std::min(one.resident, from/block_tokens*block_tokens);
    return true;
}

// Empty if there is no room or no memory, or the rows are gone.
buffer saver::copied(const job & one, uint32_t first, uint32_t count, row_source & rows) const try {
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

void saver::report(const finished & request) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (reports_.size() < most_reports) {
        reports_.push_back(request);
    }
    changed_.notify_all();
}

size_t saver::room() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return most_kept_ - std::min(most_kept_, kept_bytes_);
}

uint64_t saver::written_blocks() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return written_;
}

void saver::run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] { return ending_ || !jobs_.empty() || !reports_.empty(); });
        if (ending_) {
            return;
        }
        const auto reports = std::exchange(reports_, {});
        auto one = jobs_.empty() ? nullptr : jobs_.front();
        lock.unlock();
        try {
            for (const auto & request : reports) {
                look_up_.finish(request, lookup_timeout);
            }
            if (one != nullptr) {
                store(one);
            }
        } catch (const std::exception &) { // for instance there is no memory: it is not stored
            store_.hang_up(); // somewhere within a call
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

void saver::forget(const job & one) {
    for (const auto & block : one.kept) {
        kept_bytes_ -= block.second.size();
    }
    for (const auto & each : one.states) {
        kept_bytes_ -= each.second.size();
    }
    last_[one.slot] = { one.tokens, one.done, one.stored_states };
}

// After hang_up() it takes a moment.
bool saver::connected() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (int i = 0; i < connect_naps && !store_.up() && !ending_; ++i) {
        changed_.wait_for(lock, connect_nap, [this] { return ending_; });
    }
    return store_.up() && !ending_;
}

// The model's file is being checked: what is to be stored waits meanwhile. False if that takes too long.
bool saver::later(int & naps) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, later_nap, [this] { return ending_; });
    return ++naps < later_naps && !ending_;
}

void saver::store(const std::shared_ptr<job> & one) {
    int naps = 0;
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
        if (store_.plan(one->tokens.data(), one->tokens.size(), most, {}, offers, store_timeout, plan, windows) != status::ok) {
            return;
        }
        if (plan.outcome == 4 && later(naps)) {
            continue;
        }
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
        if (!files.empty() && store_.commit(files, store_timeout, reasons) != status::ok) {
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
        if (files.size() < plan.files.size()) {
            store_.hang_up(); // gives back what was reserved and is not filled
            if (plan.files[files.size()].kind != file_kind::window || windows.empty()) {
                return;
            }
            windows.clear(); // the slot has them no more; the states wait here
            offers = offers_of(*one, false);
            more = true;
            continue;
        }
        more = more && stored == files.size() && !files.empty();
    }
}

// The first of the files, up to one that cannot be filled: what comes after it would have nothing to go on from.
std::vector<filled> saver::fill_all(const std::shared_ptr<job> & one, const planned & plan) {
    const auto blocks = fetch(one, plan.files);
    std::vector<filled> files;
    for (size_t i = 0; i < plan.files.size(); ++i) {
        const reserved & named = plan.files[i];
        filled done;
        if (!(named.kind == file_kind::state ? fill_state(*one, named, done) : i < blocks.size() && fill(named, blocks[i].block, done))) {
            break;
        }
        files.push_back(std::move(done));
    }
    return files;
}

std::vector<saver::want> saver::fetch(const std::shared_ptr<job> & one, const std::vector<reserved> & files) {
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
    lock.unlock();
    wake_();
    lock.lock();
    changed_.wait(lock, [this] {
        return ending_ || std::all_of(wants_.begin(), wants_.end(), [](const want & each) { return each.served; });
    });
    return std::exchange(wants_, {});
}

bool saver::fill(const reserved & named, const buffer & block, filled & done) const {
    if (block.empty() || named.kind == file_kind::window) {
        return !block.empty() && write_state(named, block.data(), block.size(), done);
    }
    return write_segments(named, block.data(), segment_bytes(said_, named.rows), done);
}

} // namespace kvt
