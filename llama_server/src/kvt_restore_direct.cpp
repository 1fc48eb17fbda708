// The restorer's part in files that lie in memory: the main loop reads them into their cells, with threads beside it. To read
// such a file is to copy it; by way of a buffer it would be copied twice.
#include "kvt_restore.h"

#include "kvt_blocks.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include <linux/magic.h>
#include <sys/vfs.h>

namespace kvt {

namespace {

constexpr double round_seconds = 0.008;
constexpr size_t most_round_bytes = 64u << 20;
constexpr size_t worth_a_thread = 4u << 20;

// Not by the name of its tier alone: that may be a folder on a disk.
bool lies_in_memory(const file & named) {
    struct statfs info {};
    return named.tier == 1 && statfs(named.path.c_str(), &info) == 0 && (uint64_t) info.f_type == TMPFS_MAGIC;
}

struct task {
    const file * named;
    std::vector<char *> places;
    uint32_t lacking = shortfall_unreadable;
};

void read_all(std::vector<task> & tasks, const hello & said, size_t bytes) {
    std::atomic<size_t> next { 0 };
    const auto work = [&]() noexcept {
        for (size_t i = next++; i < tasks.size(); i = next++) {
            try {
                tasks[i].lacking = read_segments(*tasks[i].named, segment_bytes(said, tasks[i].named->rows), tasks[i].places, nullptr);
            } catch (const std::exception &) { // there is no memory: it is as if it could not be read
            }
        }
    };
    const size_t cores = std::clamp(std::thread::hardware_concurrency(), 1u, most_readers);
    std::vector<std::thread> others;
    try {
        others.reserve(cores);
        while (others.size() + 1 < std::min({ cores, tasks.size(), bytes/worth_a_thread + 1 })) {
            others.emplace_back(work);
        }
    } catch (const std::exception &) { // there are no more threads
    }
    work();
    for (auto & each : others) {
        each.join();
    }
}

} // namespace

// In a reader. False if the next file is none of those: a part of a block that is not whole is cut out of a buffer.
bool restorer::offer(job & one, const matched & found) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!one.direct || !wants_more(one, found)) {
        return false;
    }
    const file & named = found.files[one.file];
    const part wanted = wanted_part(named, one.next, one.end);
    if (wanted.rows == 0 || wanted.rows != named.rows || !lies_in_memory(named)) {
        return false;
    }
    piece whole { wanted.first, wanted.rows, 0, named.rows, {}, &named, (uint32_t) one.file };
    one.ready.emplace(one.taken, std::move(whole));
    ++one.taken;
    ++one.file;
    one.next += wanted.rows;
    changed_.notify_all();
    return true;
}

// The files stay, and so does their lease, until the main loop has read them or wants them no more.
void restorer::lend(job & one, lease & held) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto done = [&one] { return one.dropped || !one.direct || (one.lent == 0 && (one.shown >= one.taken || one.shown >= one.last)); };
    while (!changed_.wait_for(lock, held.until_then(), done)) {
        lock.unlock();
        held.renew_in_time();
        lock.lock();
    }
    const uint32_t damaged = one.damaged;
    lock.unlock();
    if (damaged != UINT32_MAX) {
        held.damaged(damaged);
    }
}

// In the main loop, which holds the lock: some of the pieces that come next. False if one of them cannot be had.
bool restorer::read_round(job & one, row_sink & sink, std::unique_lock<std::mutex> & lock) {
    std::vector<piece> round;
    size_t bytes = 0;
    while (has_next(one) && one.ready.at(one.shown).direct != nullptr && (round.empty() || bytes < one.round_bytes)) {
        bytes += block_bytes(said_, one.ready.at(one.shown).rows);
        round.push_back(std::move(one.ready.at(one.shown)));
        one.ready.erase(one.shown++);
    }
    one.lent = round.size();
    lock.unlock();
    const auto began = steady_clock::now();
    std::vector<task> tasks;
    for (const auto & each : round) {
        tasks.push_back({ each.direct, sink.places(each.first, each.rows) });
        if (tasks.back().places.empty()) { // for this one, and what comes behind it, there may be cells that lie apart
            tasks.pop_back();
            break;
        }
    }
    read_all(tasks, said_, bytes);
    uint32_t lacking = shortfall_none;
    size_t had = 0;
    for (; had < tasks.size() && (lacking = tasks[had].lacking) == shortfall_none; ++had) {
        sink.put(round[had].first, round[had].rows);
    }
    if (had < tasks.size()) {
        sink.spoiled(round[had].first);
    }
    buffer block(had == tasks.size() && had < round.size() ? buffer_bytes_ : 0);
    for (; lacking == shortfall_none && had < round.size(); ++had) {
        const auto sizes = segment_bytes(said_, round[had].rows);
        lacking = read_segments(*round[had].direct, sizes, places_in(block.data(), sizes), nullptr);
        if (lacking == shortfall_none && !sink.write(round[had].first, round[had].rows, block.data(), round[had].rows, 0)) {
            lacking = shortfall_no_cells;
        }
        if (lacking != shortfall_none) {
            break;
        }
    }
    const double seconds = seconds_since(began);
    lock.lock();
    for (size_t i = 0; i < had; ++i) {
        one.written = round[i].first + round[i].rows;
        one.report.restored_bytes += block_bytes(said_, round[i].rows);
    }
    one.report.copy_seconds += seconds;
    one.round_bytes = std::min((size_t) ((double) bytes*round_seconds/std::max(seconds, 1e-6)), most_round_bytes);
    one.moved = steady_clock::now();
    one.lent = 0;
    if (lacking != shortfall_none) {
        one.last = one.shown;
        one.report.reason = lacking;
        one.damaged = lacking == shortfall_damaged ? round[had].number : UINT32_MAX;
    }
    changed_.notify_all();
    return lacking == shortfall_none;
}

} // namespace kvt
