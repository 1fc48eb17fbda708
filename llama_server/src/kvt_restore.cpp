#include "kvt_restoring.h"

#include "kvt_blocks.h"
#include "kvt_images.h"

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

restorer::restorer(const client & look_up, const client & waiting, hello said, size_t most_bytes, milliseconds stall)
    : own_(std::make_shared<restoring>(look_up.shared(), waiting.shared(), std::move(said), most_bytes, stall)) {}

restorer::~restorer() { own_->end(); }

void restorer::read_into(std::shared_ptr<block_memory> memory) { own_->read_into(std::move(memory)); }

void restorer::begin(int slot, std::vector<int32_t> tokens, uint32_t have, uint32_t held, std::vector<fingerprint> fingerprints, bool direct) {
    own_->begin(slot, std::move(tokens), have, held, std::move(fingerprints), direct);
}

bool restorer::busy(int slot) const { return own_->busy(slot); }

uint32_t restorer::start(int slot) const { return own_->start(slot); }

bool restorer::step(int slot, row_sink & sink, steady_clock::time_point until, finished & report, std::vector<fingerprint> & fingerprints) {
    return own_->step(slot, sink, until, report, fingerprints);
}

void restorer::drop(int slot) noexcept { own_->drop(slot); }

size_t restorer::ahead() const { return own_->ahead(); }

void restorer::wait(milliseconds most) { own_->wait(most); }

restoring::restoring(std::shared_ptr<connection> look_up, std::shared_ptr<connection> waiting, hello said, size_t most_bytes,
                     milliseconds stall)
    : look_up_(std::move(look_up)), waiting_(std::move(waiting)), said_(std::move(said)),
      buffer_bytes_(std::max(room_bytes(said_, block_tokens), page_bytes)), most_bytes_(most_bytes), most_stall_(stall) {}

void restoring::end() {
    while (!jobs_.empty()) {
        retire(jobs_.begin());
    }
    const auto until = steady_clock::now() + most_ending;
    for (const auto & one : retired_) {
        const auto left = std::chrono::duration_cast<milliseconds>(until - steady_clock::now());
        one->thread.leave(std::max(left, milliseconds(0)));
    }
    retired_.clear();
}

void restoring::read_into(std::shared_ptr<block_memory> memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    memory_ = std::move(memory);
}

void restoring::begin(int slot, std::vector<int32_t> tokens, uint32_t have, uint32_t held, std::vector<fingerprint> fingerprints, bool direct) {
    drop(slot);
    jobs made;
    made.push_back(std::make_shared<job>());
    job & one = *made.back();
    one.slot = slot;
    one.tokens = std::move(tokens);
    one.have = have;
    one.asked = askable(one.tokens, have);
    one.fingerprints = std::move(fingerprints);
    one.fingerprints.resize(std::min<size_t>(one.fingerprints.size(), one.asked/block_tokens));
    one.direct = direct;
    one.written = one.held = one.end = held;
    if (hanging()) {
        one.report.reason = shortfall_hanging;
        one.read = one.ended = true;
    } else {
        one.thread.start([self = shared_from_this(), its = made.back()] { self->run(*its); });
    }
    jobs_.splice(jobs_.end(), made);
}

restoring::jobs::const_iterator restoring::find(int slot) const {
    return std::find_if(jobs_.begin(), jobs_.end(), [slot](const auto & one) { return one->slot == slot; });
}

void restoring::drop(int slot) noexcept {
    const auto found = find(slot);
    if (found != jobs_.end()) {
        retire(found);
    }
}

size_t restoring::ahead() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return ahead_;
}

void restoring::retire(jobs::const_iterator found) noexcept {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        (*found)->dropped = true;
    }
    changed_.notify_all();
    retired_.splice(retired_.end(), jobs_, found);
}

void restoring::reap() {
    retired_.remove_if([this](const auto & one) {
        std::unique_lock<std::mutex> lock(mutex_);
        const bool ended = one->ended;
        lock.unlock();
        return ended && one->thread.leave();
    });
}

// A thread of a prompt that nobody wants any more still reads, and has been for too long, or there are too many of them.
bool restoring::hanging() {
    reap();
    std::lock_guard<std::mutex> lock(mutex_);
    const auto since = steady_clock::now() - most_stall_;
    const auto hangs = [since](const auto & one) { return one->stalled || one->moved + one->slack < since; };
    return retired_.size() >= most_retired || std::any_of(retired_.begin(), retired_.end(), hangs);
}

uint32_t restoring::start(int slot) const {
    const auto found = find(slot);
    std::lock_guard<std::mutex> lock(mutex_);
    return found == jobs_.end() ? UINT32_MAX : (*found)->start;
}

// Of the whole blocks that the slot has now: those before what came, and those of the files.
std::vector<fingerprint> restoring::fingerprints_of(const job & one) {
    auto all = one.fingerprints;
    all.resize(std::min<size_t>(all.size(), one.start/block_tokens));
    for (size_t i = 0; i < one.blocks && one.came; ++i) {
        const file & named = one.found.files[i];
        const size_t first = all.size()*block_tokens;
        if (named.rows != block_tokens || named.first_position != first || first + block_tokens > std::min(one.written, one.end)) {
            break;
        }
        all.push_back(fingerprint_of(named.crcs));
    }
    return all;
}

bool restoring::step(int slot, row_sink & sink, steady_clock::time_point until, finished & report, std::vector<fingerprint> & fingerprints) {
    job & one = **find(slot);
    std::unique_lock<std::mutex> lock(mutex_);
    if (has_next(one) || (said_.states && one.read)) {
        lock.unlock();
        const auto began = steady_clock::now();
        sink.settle();
        until += steady_clock::now() - began;
        lock.lock();
    }
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
            one.came = true;
            one.written = next.first + next.rows;
            one.report.restored_bytes += block_bytes(said_, next.rows);
        } else {
            one.report.reason = shortfall_no_cells;
        }
    }
    const bool over = one.read || one.shown >= one.last;
    if (written && !over) {
        lock.unlock();
        const bool beside_one = hanging();
        lock.lock();
        const auto patience = beside_one ? std::min(most_stall_, stall_beside_one) : most_stall_ + one.slack;
        if (steady_clock::now() - one.moved <= patience) {
            return false;
        }
        one.stalled = true;
        one.report.reason = shortfall_unreadable;
    }
    const bool stalled = one.stalled;
    if (said_.states && stalled) {
        one.report.restored_bytes = 0; // rows alone are of no use, and the thread may yet write the rest
    } else if (said_.states) {
        lock.unlock();
        resume(one, sink);
        lock.lock();
    } else if (one.came) {
        one.written = resumable(one.tokens, one.written); // the slot does not hold a part of an image
        // Where the end of what was to take the place of the slot's rows is lacking, it has fewer than before.
        const bool more = one.written > one.held;
        one.report.restored_tokens = one.written - (more ? one.held : one.start);
        one.have = more ? one.have : one.start;
    }
    one.came = one.came && one.report.restored_tokens > 0;
    fingerprints = fingerprints_of(one);
    report.memory_tokens   = one.have;
    report.restored_tokens = one.report.restored_tokens;
    report.restored_bytes  = one.report.restored_bytes;
    report.reason          = one.report.reason;
    report.at              = one.report.at;
    report.lookup_seconds  = one.report.lookup_seconds;
    report.fetch_seconds   = one.report.fetch_seconds;
    report.copy_seconds    = one.report.copy_seconds;
    report.expected_ms     = one.found.expected_ms;
    lock.unlock();
    drop(slot);
    return true;
}

void restoring::wait(milliseconds most) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, most, [this] {
        return std::any_of(jobs_.begin(), jobs_.end(), [](const auto & each) { return each->read || has_next(*each); });
    });
}

// Without memory, or whatever else is thrown, what has come so far is all.
void restoring::run(job & one) noexcept {
    try {
        read(one);
    } catch (const std::exception &) {
        give_up(one);
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

// Files that are lent to the main loop are no longer kept: it gets no more of them.
void restoring::give_up(job & one) {
    std::unique_lock<std::mutex> lock(mutex_);
    one.state.clear();
    one.windows.clear();
    one.last = one.shown;
    one.report.reason = shortfall_no_memory;
    changed_.wait(lock, [&one] { return one.lent == 0; });
}

// Nobody goes on within an image: where what is stored ends in one, the prompt is asked for up to that image.
status restoring::match(const job & one, connection & from, matched & found) {
    for (size_t count = one.tokens.size();;) {
        const status got = from.match(one.tokens.data(), count, one.asked, extras_of(one.tokens, count), one.fingerprints, lookup_timeout, found);
        const uint32_t whole = resumable(one.tokens, found.rows);
        const bool gains = whole >= one.have + std::max(from.greeting().min_tokens, 1u);
        if (got != status::ok || found.rows == 0 || (whole == found.rows && gains)) {
            return got;
        }
        from.release(found.lease_id, release_timeout);
        if (!gains || whole + 1 >= count) {
            found = {};
            found.reason = shortfall_ends;
            found.at = whole;
            return got;
        }
        count = whole + 1; // of which the last is always computed
    }
}

void restoring::read(job & one) {
    look_up_->wait_first(lookup_timeout);
    const auto began = steady_clock::now();
    matched found;
    status got = status::ok;
    // as the sidecar would say: a resident hit does not ask
    if (one.tokens.size() < (size_t) one.have + 1 + look_up_->greeting().min_tokens) {
        found.reason = shortfall_too_short;
    } else if (!dropped(one)) {
        got = match(one, *look_up_, found);
    }
    if (got == status::ok && found.pending) {
        look_up_->release(found.lease_id, release_timeout);
        fetched(one, began);
        return;
    }
    answered(one, std::move(found), got, began);
    if (got == status::ok) {
        read_named(one, look_up_);
    }
}

// Reads what has to be fetched first. Prompts take turns; one that nobody wants any more gives up its own.
void restoring::fetched(job & one, steady_clock::time_point began) {
    const turn mine(*this, one, began + milliseconds(most_wait_ms));
    matched found;
    status got = status::late;
    if (mine.has) {
        waiting_->wait_first(lookup_timeout);
        got = match(one, *waiting_, found);
        if (got == status::ok && found.pending) {
            const uint32_t most = std::min<uint32_t>(most_wait_ms, 200 + 2*std::min(found.expected_ms, most_wait_ms));
            got = waiting_->wait(found.lease_id, milliseconds(most), found);
        }
    }
    answered(one, std::move(found), got, began);
    if (got == status::ok) {
        read_named(one, waiting_);
    }
}

restoring::turn::turn(restoring & its, job & one, steady_clock::time_point latest) : of(its) {
    std::unique_lock<std::mutex> lock(of.mutex_);
    of.changed_.wait_until(lock, latest, [&] { return one.dropped || !of.fetching_; });
    has = !one.dropped && !of.fetching_;
    of.fetching_ = of.fetching_ || has;
}

restoring::turn::~turn() {
    if (has) {
        std::lock_guard<std::mutex> lock(of.mutex_);
        of.fetching_ = false;
        of.changed_.notify_all();
    }
}

bool restoring::dropped(const job & one) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return one.dropped;
}

// From here on the answer is the job's. Before, the main loop may end one that takes too long, and says what it knows of it.
void restoring::answered(job & one, matched found, status got, steady_clock::time_point began) {
    std::lock_guard<std::mutex> lock(mutex_);
    one.found = std::move(found);
    one.report.lookup_seconds = seconds_since(began);
    one.report.reason = got == status::ok ? one.found.reason : reason_of(got);
    one.report.at = one.found.at;
}

void restoring::read_named(job & one, const std::shared_ptr<connection> & from) {
    lease held(from, one.found.lease_id);
    if (read_end(one, held)) {
        read_files(one, held);
    }
    held.release();
}

} // namespace kvt
