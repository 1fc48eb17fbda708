#include "kvt_saver.h"

#include "kvt_file.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include <unistd.h>

namespace kvt {

namespace {

using clock = std::chrono::steady_clock;

constexpr milliseconds store_timeout { 5000 };
constexpr milliseconds connect_nap { 50 };
constexpr int connect_naps = 40;
constexpr size_t batch_bytes = 16u << 20;
constexpr size_t most_files = 64;
constexpr size_t most_reports = 64;
constexpr size_t most_jobs = 64;

uint32_t block_end(uint32_t first, size_t count) { return (uint32_t) std::min<size_t>((size_t) first + block_tokens, count); }

} // namespace

saver::saver(client & store, client & look_up, hello said, std::function<void()> wake)
    : store_(store), look_up_(look_up), said_(std::move(said)), wake_(std::move(wake)), thread_([this] { run(); }) {}

saver::~saver() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void saver::add(int slot, std::vector<int32_t> tokens, uint32_t stored) {
    if (!store_.up() || tokens.empty()) {
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
    const auto & before = found->second.first;
    const auto most = std::min<size_t>({ found->second.second, before.size(), tokens.size() });
    const auto end = before.begin() + (std::ptrdiff_t) most;
    return (uint32_t) (std::mismatch(before.begin(), end, tokens.begin()).first - before.begin());
}

void saver::step(row_source & rows, milliseconds most) {
    bool more = false;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (wants_.empty()) {
            return;
        }
        const auto until = clock::now() + most;
        for (auto & one : wants_) {
            if (one.served) {
                continue;
            }
            if (clock::now() >= until) {
                more = true;
                break;
            }
            serve(one, rows);
        }
    }
    if (more) {
        wake_();
    } else {
        changed_.notify_all();
    }
}

void saver::serve(want & one, row_source & rows) {
    job & of = *jobs_.front();
    const auto kept = of.kept.find(one.first);
    if (kept != of.kept.end() && kept->second.size() == block_bytes(said_, one.rows)) {
        one.block = kept->second;
    } else if (one.first + one.rows <= of.resident) {
        one.block.resize(block_bytes(said_, one.rows));
        if (!rows.read(of.slot, of.tokens, one.first, one.rows, one.block.data())) {
            one.block.clear();
        }
    }
    one.served = true;
}

void saver::keep(int slot, uint32_t from, row_source & rows) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto & one : jobs_) {
        if (one->slot == slot && one->resident > from) {
            keep_of(*one, from, rows);
        }
    }
}

void saver::keep_of(job & one, uint32_t from, row_source & rows) {
    uint32_t first = std::max(from, one.done)/block_tokens*block_tokens;
    const uint32_t end = one.resident;
    one.resident = std::min(end, from/block_tokens*block_tokens);
    while (first < end) {
        const uint32_t count = block_end(first, one.tokens.size()) - first;
        std::vector<char> block(block_bytes(said_, count));
        if (kept_bytes_ + block.size() > most_kept_bytes || !rows.read(one.slot, one.tokens, first, count, block.data())) {
            return;
        }
        kept_bytes_ += block.size();
        one.kept[first] = std::move(block);
        first += count;
    }
}

void saver::report(const finished & request) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (reports_.size() < most_reports) {
        reports_.push_back(request);
    }
    changed_.notify_all();
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
        const auto one = jobs_.empty() ? nullptr : jobs_.front();
        lock.unlock();
        for (const auto & request : reports) {
            look_up_.finish(request, lookup_timeout);
        }
        if (one != nullptr) {
            store(one);
        }
        lock.lock();
        if (one != nullptr) {
            forget(*one);
            jobs_.pop_front();
        }
    }
}

void saver::forget(const job & one) {
    for (const auto & block : one.kept) {
        kept_bytes_ -= block.second.size();
    }
    last_[one.slot] = { one.tokens, one.done };
}

// After hang_up() it takes a moment.
bool saver::connected() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (int i = 0; i < connect_naps && !store_.up() && !ending_; ++i) {
        changed_.wait_for(lock, connect_nap, [this] { return ending_; });
    }
    return store_.up() && !ending_;
}

void saver::store(const std::shared_ptr<job> & one) {
    const size_t fit = batch_bytes/std::max<size_t>(block_bytes(said_, block_tokens), 1);
    const uint32_t most = (uint32_t) std::clamp<size_t>(fit, 1, most_files);
    for (bool more = true; more && connected();) {
        planned plan;
        if (store_.plan(one->tokens.data(), one->tokens.size(), most, {}, {}, store_timeout, plan) != status::ok) {
            return;
        }
        more = plan.outcome == 1;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            const bool all = plan.files.empty() && plan.outcome == 0;
            one->done = all ? (uint32_t) one->tokens.size() : plan.files.empty() ? one->done : plan.files[0].first_position;
        }
        const auto blocks = fetch(one, plan.files);
        std::vector<filled> files;
        for (size_t i = 0; i < blocks.size(); ++i) {
            filled done;
            if (blocks[i].block.empty() || !fill(plan.files[i], blocks[i].block, done)) {
                break; // what comes after it would have nothing to go on from
            }
            files.push_back(std::move(done));
        }
        std::vector<std::string> reasons;
        if (!files.empty() && store_.commit(files, store_timeout, reasons) != status::ok) {
            return;
        }
        size_t stored = 0;
        while (stored < reasons.size() && reasons[stored].empty()) {
            ++stored;
        }
        if (stored > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            written_ += stored;
            one->done = plan.files[stored - 1].first_position + plan.files[stored - 1].rows;
        }
        if (files.size() < plan.files.size()) {
            store_.hang_up(); // gives back what was reserved and is not filled
            return;
        }
        more = more && stored == files.size() && !files.empty();
    }
}

std::vector<saver::want> saver::fetch(const std::shared_ptr<job> & one, const std::vector<reserved> & files) {
    std::vector<want> wants;
    for (const auto & named : files) {
        const uint64_t end = (uint64_t) named.first_position + named.rows;
        if (named.rows == 0 || end > one->tokens.size() || end != block_end(named.first_position, one->tokens.size())) {
            break; // not a block of these tokens
        }
        wants.push_back({ named.first_position, named.rows, false, {} });
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

bool saver::fill(const reserved & named, const std::vector<char> & block, filled & done) const {
    std::string why;
    const int fd = open_for_writing(named, why);
    if (fd < 0) {
        return false;
    }
    done.id = named.id;
    uint64_t offset = named.payload_offset;
    size_t at = 0;
    bool written = true;
    for (size_t bytes : segment_bytes(said_, named.rows)) {
        done.crcs.push_back(0);
        written = written && write_segment(fd, offset, block.data() + at, bytes, done.crcs.back(), why);
        offset += page_aligned(bytes);
        at += bytes;
    }
    close(fd);
    return written;
}

} // namespace kvt
