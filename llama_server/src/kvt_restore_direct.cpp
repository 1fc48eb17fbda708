// The restorer's part in files that lie in memory: the main loop reads them into their cells, with threads beside it. To read
// such a file is to copy it; by way of a buffer it would be copied twice.
#include "kvt_restoring.h"

#include "kvt_blocks.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <linux/magic.h>
#include <sys/vfs.h>

namespace kvt {

namespace {

constexpr size_t worth_a_thread = 4u << 20;

// Not by the name of its tier alone: that may be a folder on a disk.
bool lies_in_memory(const file & named) {
    struct statfs info {};
    return named.tier == memory_tier && statfs(named.path.c_str(), &info) == 0 && (uint64_t) info.f_type == TMPFS_MAGIC;
}

// Blocks that are read at a time, by all threads: each takes the segment that is next.
class block_round {
public:
    void add(const file & named, const std::vector<size_t> & sizes, const std::vector<char *> & places) {
        std::string why;
        lacking_.push_back(shortfall_unreadable);
        const int fd = sizes.size() == named.crcs.size() && sizes.size() == places.size() ? open_for_reading(named, why) : -1;
        if (fd < 0) {
            return;
        }
        files_.push_back(std::make_unique<opened>(fd));
        lacking_.back() = shortfall_none;
        uint64_t offset = named.payload_offset;
        for (size_t i = 0; i < sizes.size(); ++i) {
            segments_.push_back({ lacking_.size() - 1, fd, offset, places[i], sizes[i], named.crcs[i] });
            offset += page_aligned(sizes[i]);
            bytes_ += sizes[i];
        }
    }

    void read() {
        const size_t cores = std::clamp(std::thread::hardware_concurrency(), 1u, most_readers);
        std::vector<std::thread> others;
        try {
            others.reserve(cores);
            while (others.size() + 1 < std::min(cores, bytes_/worth_a_thread + 1)) {
                others.emplace_back([this] { work(); });
            }
        } catch (const std::exception &) { // there are no more threads
        }
        work();
        for (auto & each : others) {
            each.join();
        }
    }

    size_t size() const { return lacking_.size(); }
    uint32_t lacking(size_t block) const { return lacking_[block]; }

private:
    struct segment {
        size_t block;
        int fd;
        uint64_t offset;
        char * to;
        size_t bytes;
        uint32_t crc;
    };

    void work() noexcept {
        for (size_t i = next_++; i < segments_.size(); i = next_++) {
            const segment & one = segments_[i];
            bool sound = false;
            try {
                std::string why;
                sound = read_segment(one.fd, one.offset, one.to, one.bytes, one.crc, why);
            } catch (const std::exception &) { // there is no memory
            }
            if (!sound) {
                std::lock_guard<std::mutex> lock(mutex_);
                lacking_[one.block] = shortfall_damaged;
            }
        }
    }

    std::vector<std::unique_ptr<opened>> files_;
    std::vector<segment> segments_;
    std::vector<uint32_t> lacking_; // of each block
    size_t bytes_ = 0;
    std::atomic<size_t> next_ { 0 };
    std::mutex mutex_;
};

} // namespace

// In a reader. False if the next file is none of those: a part of a block that is not whole is cut out of a buffer.
bool restoring::offer(job & one) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (one.direct && wants_more(one)) {
        const size_t number = one.file;
        const file & named = one.found.files[number];
        const part wanted = wanted_part(named, one.next, one.end);
        if (wanted.rows == 0 || wanted.rows != named.rows) {
            return false;
        }
        lock.unlock();
        const bool in_memory = lies_in_memory(named); // on a disk that hangs it would be asked for as long
        lock.lock();
        if (number != one.file) {
            continue; // another reader has it
        }
        if (!in_memory) {
            return false;
        }
        one.ready.emplace(one.taken, piece { wanted.first, wanted.rows, 0, named.rows, {}, &named, (uint32_t) number });
        ++one.taken;
        ++one.file;
        one.next += wanted.rows;
        changed_.notify_all();
        return true;
    }
    return false;
}

// The files stay, and so does their lease, until the main loop has read them or wants them no more.
void restoring::lend(job & one, lease & held) {
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

// In the main loop, which holds the lock: as many of the pieces that come next as take until `until`, by how long the last
// ones took. False if one of them cannot be had.
bool restoring::read_round(job & one, row_sink & sink, steady_clock::time_point until, std::unique_lock<std::mutex> & lock) {
    const double left = std::chrono::duration<double>(until - steady_clock::now()).count();
    const size_t most = one.bytes_per_second > 0 ? (size_t) std::max(one.bytes_per_second*left, 0.0) : first_round_bytes;
    std::vector<piece> round;
    size_t bytes = 0;
    while (has_next(one) && one.ready.at(one.shown).direct != nullptr && (round.empty() || bytes < most)) {
        bytes += block_bytes(said_, one.ready.at(one.shown).rows);
        round.push_back(std::move(one.ready.at(one.shown)));
        one.ready.erase(one.shown++);
    }
    one.lent = round.size();
    lock.unlock();
    const auto began = steady_clock::now();
    size_t had = 0;
    uint32_t lacking = shortfall_none;
    std::exception_ptr thrown;
    try {
        lacking = read_into(sink, round, had);
    } catch (const std::exception &) {
        thrown = std::current_exception();
        lacking = shortfall_no_memory;
    }
    const double seconds = seconds_since(began);
    lock.lock();
    for (size_t i = 0; i < had; ++i) {
        one.came = true;
        one.written = round[i].first + round[i].rows;
        one.report.restored_bytes += block_bytes(said_, round[i].rows);
    }
    one.report.copy_seconds += seconds;
    one.bytes_per_second = (double) bytes/std::max(seconds, 1e-6);
    one.moved = steady_clock::now();
    one.lent = 0; // whatever was thrown: the reader waits for it
    if (lacking != shortfall_none) {
        one.last = one.shown;
        one.report.reason = lacking;
        one.damaged = lacking == shortfall_damaged ? round[had].number : UINT32_MAX;
    }
    changed_.notify_all();
    if (thrown != nullptr) {
        std::rethrow_exception(thrown);
    }
    return lacking == shortfall_none;
}

// `had`: of these pieces, those that are there; then why the next one is not. Bytes that were not compared with their checksums
// stay in no cell, whatever is thrown.
uint32_t restoring::read_into(row_sink & sink, const std::vector<piece> & round, size_t & had) const {
    struct unread {
        row_sink & sink;
        const std::vector<piece> & round;
        const size_t & had;
        size_t placed = 0;
        ~unread() {
            if (had < placed) {
                sink.spoiled(round[had].first);
            }
        }
    };
    {
        unread rest { sink, round, had };
        block_round blocks;
        for (const auto & each : round) {
            ++rest.placed; // also if it throws
            const auto places = sink.places(each.first, each.rows);
            if (places.empty()) { // for this one, and what comes behind it, there may be cells that lie apart
                --rest.placed;
                break;
            }
            blocks.add(*each.direct, segment_bytes(said_, each.rows), places);
        }
        blocks.read();
        for (uint32_t lacking = shortfall_none; had < blocks.size(); ++had) {
            lacking = blocks.lacking(had);
            if (lacking != shortfall_none) {
                return lacking;
            }
            sink.put(round[had].first, round[had].rows);
        }
    }
    for (buffer block(had < round.size() ? buffer_bytes_ : 0); had < round.size(); ++had) {
        const auto sizes = segment_bytes(said_, round[had].rows);
        const uint32_t lacking = read_segments(*round[had].direct, sizes, places_in(block.data(), sizes), nullptr);
        if (lacking != shortfall_none) {
            return lacking;
        }
        if (!sink.write(round[had].first, round[had].rows, block.data(), round[had].rows, 0)) {
            return shortfall_no_cells;
        }
    }
    return shortfall_none;
}

} // namespace kvt
