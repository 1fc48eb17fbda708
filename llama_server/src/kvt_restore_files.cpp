// The restorer's part in files of rows: several threads read and check them, and the main loop gets them in their order.
#include "kvt_restoring.h"

#include "kvt_blocks.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

namespace kvt {

namespace {

constexpr size_t files_of_a_reader = 8; // fewer are not worth a thread

// Of memory one thread copies less than there is, and of a disk it has one request at a time.
size_t readers_of(size_t files) {
    const size_t cores = std::clamp(std::thread::hardware_concurrency(), 1u, most_readers);
    return std::clamp<size_t>(files/files_of_a_reader, 1, cores);
}

} // namespace

void restoring::read_files(job & one, lease & held) {
    one.next = one.start;
    while (offer(one)) {
    }
    const size_t readers = readers_of(one.blocks - one.file);
    std::vector<std::thread> others;
    others.reserve(readers);
    try {
        while (others.size() + 1 < readers) {
            others.emplace_back([&] { read_some(one, held); });
        }
    } catch (const std::exception &) { // there are no more threads
    }
    read_some(one, held);
    for (auto & each : others) {
        each.join();
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        one.report.fetch_seconds += one.slowest;
    }
    lend(one, held);
}

// Without memory, or whatever else is thrown, what the main loop has had is all.
void restoring::read_some(job & one, lease & held) noexcept {
    double seconds = 0;
    try {
        while (offer(one) || read_piece(one, held, seconds)) {
        }
    } catch (const std::exception &) {
        std::lock_guard<std::mutex> lock(mutex_);
        one.last = one.shown;
        one.report.reason = shortfall_unreadable;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    one.slowest = std::max(one.slowest, seconds);
    changed_.notify_all(); // there may be a buffer more
}

// Whether the next file is to be read.
bool restoring::wants_more(job & one) const {
    return !one.dropped && one.file < one.blocks && one.next < one.end && one.taken < one.last;
}

// False if there is nothing more to be read.
bool restoring::read_piece(job & one, lease & held, double & seconds) {
    buffer block;
    if (!get_buffer(one, held, block)) {
        return false;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    if (!wants_more(one)) {
        one.spare.push_back(std::move(block));
        return false;
    }
    const size_t file = one.file++;
    const uint32_t number = one.taken++;
    const part wanted = wanted_part(one.found.files[file], one.next, one.end);
    one.next += wanted.rows;
    lock.unlock();
    const auto began = steady_clock::now();
    const uint32_t lacking = wanted.rows > 0 ? read_checked(one, file, held, block.data()) : (uint32_t) shortfall_sidecar_error;
    seconds += seconds_since(began);
    lock.lock();
    if (lacking == shortfall_none) {
        one.ready.emplace(number, piece { wanted.first, wanted.rows, wanted.skip, one.found.files[file].rows, std::move(block) });
        changed_.notify_all();
        return true;
    }
    one.spare.push_back(std::move(block));
    if (number < one.last) {
        one.last = number;
        one.report.reason = lacking;
    }
    return false;
}

uint32_t restoring::read_checked(const job & one, size_t file, lease & held, char * block) const {
    const uint32_t lacking = read_block(said_, one.found.files[file], held, block);
    if (lacking == shortfall_damaged) {
        held.damaged((uint32_t) file);
    }
    return lacking;
}

// One that the main loop has done with, or a new one. Each job may have two, whatever the others hold. False if nobody
// wants the rows any more.
bool restoring::get_buffer(job & one, lease & held, buffer & to) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto there = [&] { return one.dropped || !one.spare.empty() || one.buffers < 2 || ahead_ + buffer_bytes_ <= most_bytes_; };
    while (!changed_.wait_for(lock, held.until_then(), there)) {
        lock.unlock();
        held.renew_in_time();
        lock.lock();
    }
    if (one.dropped) {
        return false;
    }
    if (!one.spare.empty()) {
        to = std::move(one.spare.back());
        one.spare.pop_back();
        return true;
    }
    ++one.buffers;
    one.ahead += buffer_bytes_;
    ahead_ += buffer_bytes_;
    auto from = memory_;
    lock.unlock();
    to = buffer(buffer_bytes_, std::move(from));
    return true;
}

} // namespace kvt
