// The restorer's part in states and windows: what goes in behind the rows.
#include "kvt_restoring.h"

#include "kvt_images.h"

#include <algorithm>
#include <utility>

namespace kvt {

namespace {

constexpr size_t slow_bytes_per_ms = 20000; // of a disk that is slow and does not hang

} // namespace

// The thread has read all that it will, and nobody else knows of the job.
void restoring::resume(job & one, row_sink & sink) {
    if ((one.state.empty() && one.windows.empty()) || one.written < one.end) {
        one.report.restored_bytes = 0;
        return;
    }
    const auto began = steady_clock::now();
    if (sink.resume(one.end, one.state, one.windows)) {
        one.report.restored_tokens = one.end - one.have;
        one.report.restored_bytes += one.state.size();
        for (const auto & each : one.windows) {
            one.report.restored_bytes += each.bytes.size();
        }
    } else {
        one.have = one.start = 0; // the slot is empty
        one.report.restored_bytes = 0;
        one.report.reason = shortfall_unreadable;
    }
    one.report.copy_seconds += seconds_since(began);
}

// The first file is the block in which the slot's rows end, if all before it are of one history with it, or the first of all.
bool restoring::begins_well(job & one) {
    const uint32_t first = one.blocks > 0 ? one.found.files[0].first_position : 0;
    const bool goes_on = first > 0 && first == one.asked/block_tokens*block_tokens && one.fingerprints.size() == first/block_tokens;
    if (one.blocks == 0 || (first > 0 && !goes_on)) {
        return false;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    one.start = one.written = first;
    return true;
}

// How far rows are wanted; with states, what goes in behind them, without which they are of no use.
bool restoring::read_end(job & one, lease & held) {
    // The last token is always computed: sampling needs its logits. The sidecar knows, and is not trusted with it.
    const uint32_t most = (uint32_t) std::max<size_t>(one.tokens.size(), 1) - 1;
    one.blocks = 0;
    while (one.blocks < one.found.files.size() && one.found.files[one.blocks].kind == file_kind::rows) {
        ++one.blocks;
    }
    if (!said_.states || one.found.files.empty()) {
        one.end = resumable(one.tokens, std::min(one.found.rows, most));
        return !said_.states && begins_well(one);
    }
    std::vector<char> state;
    std::vector<window> windows;
    const bool fits = one.blocks < one.found.files.size() && one.found.rows > one.have && one.found.rows <= most &&
                      resumable(one.tokens, one.found.rows) == one.found.rows && begins_well(one);
    uint32_t lacking = fits ? (uint32_t) shortfall_none : (uint32_t) shortfall_sidecar_error;
    one.end = one.found.rows;
    if (lacking == shortfall_none && !reserve(one, held)) {
        lacking = shortfall_no_memory;
    }
    const auto began = steady_clock::now(); // until there was room, nothing was read
    for (size_t i = one.blocks; i < one.found.files.size() && lacking == shortfall_none; ++i) {
        lacking = read_beside(one, one.found.files[i], held, state, windows);
        if (lacking == shortfall_damaged) {
            held.damaged((uint32_t) i);
        }
        std::lock_guard<std::mutex> lock(mutex_);
        one.moved = steady_clock::now();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    one.slack = milliseconds(0);
    one.report.fetch_seconds += seconds_since(began);
    if (lacking != shortfall_none) {
        one.report.reason = lacking;
        return false;
    }
    one.state = std::move(state);
    one.windows = std::move(windows);
    return true;
}

// One state, or windows that follow one another up to the last row.
uint32_t restoring::read_beside(const job & one, const file & named, lease & held, std::vector<char> & state,
                               std::vector<window> & windows) const {
    if (named.kind == file_kind::state) {
        const bool fits = named.first_position == one.end && named.rows == 0 && state.empty() && windows.empty();
        return fits ? read_state(named, held, state) : (uint32_t) shortfall_sidecar_error;
    }
    const uint32_t next = windows.empty() ? named.first_position : windows.back().first + windows.back().rows;
    const bool fits = named.kind == file_kind::window && state.empty() && named.rows > 0 && named.rows <= block_tokens &&
                      named.first_position == next && next < one.end && named.used == (uint64_t) named.rows*said_.window_row_bytes;
    if (!fits) {
        return shortfall_sidecar_error;
    }
    window got;
    got.first = named.first_position;
    got.rows = named.rows;
    const uint32_t lacking = read_state(named, held, got.bytes);
    windows.push_back(std::move(got));
    return lacking;
}

// Room for what goes in behind the rows, in what may be read ahead. Of one prompt there always is: it may be larger than all.
// False if it takes too long, or nobody wants the rows any more.
bool restoring::reserve(job & one, lease & held) {
    size_t bytes = 0;
    size_t largest = 0;
    for (size_t i = one.blocks; i < one.found.files.size(); ++i) {
        bytes += (size_t) one.found.files[i].used;
        largest = std::max(largest, (size_t) one.found.files[i].used);
    }
    const auto latest = steady_clock::now() + milliseconds(most_wait_ms);
    std::unique_lock<std::mutex> lock(mutex_);
    const auto there = [&] { return one.dropped || besides_ == 0 || ahead_ + bytes <= most_bytes_; };
    while (!changed_.wait_for(lock, std::min(held.until_then(), milliseconds(most_wait_ms)), there)) {
        if (steady_clock::now() >= latest) {
            return false;
        }
        lock.unlock();
        held.renew_in_time();
        lock.lock();
    }
    if (one.dropped) {
        return false;
    }
    one.moved = steady_clock::now();
    one.slack = milliseconds((int64_t) (largest/slow_bytes_per_ms));
    one.beside = true;
    ++besides_;
    one.ahead += bytes;
    ahead_ += bytes;
    return true;
}

} // namespace kvt
