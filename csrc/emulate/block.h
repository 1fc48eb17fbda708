// One block of threads in lockstep emulation, and what its checks know of shared memory.
//
// Threads run one at a time, in an order drawn anew between any two meeting points, each until it must wait for others:
// at a block barrier, or where a warp's lanes work together (shuffle, matrix load, matrix product). Reported, as text:
//   race      shared memory written by one thread and touched by another with no barrier between
//   early     read what an asynchronous copy has been told to fill and that is not known to have landed
//   unwritten shared memory read that nobody wrote
//   diverged  a barrier or a warp's step that some threads reach and others do not
//   outside   an address beyond shared memory, or beyond every buffer given to the launch
// Asynchronous copies land as late as allowed: when the thread waits for them, else never.
#pragma once
#include "../cuda/sites.h"
#include "fiber.h"
#include "tensor_core.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace paged_attn::gpu::emulate {

struct Buffer { // global memory that a launch may touch
    const char *begin, *end;
    ptrdiff_t moved = 0; // its bytes lie so far from its addresses, which the host may not be able to read
};

// What is wrong on purpose. All of it: nothing.
struct Mutant {
    At left_out = At::none;           // a meeting point, or a wait for copies
    At waits_for_one_less = At::none; // a wait for copies that lets one group more be under way
    int shuffle_mask = 0;             // a shuffle over this mask brings a lane its own value
    int shared_bytes_less = 0;        // of each launch
};

struct Findings {
    std::set<std::string> texts;
    void add(const std::string &text) {
        if (texts.size() < 20) texts.insert(text);
    }
};

class Block {
public:
    Block(int n_threads, int at_x, int at_y, int at_z, size_t shared_bytes, const std::vector<Buffer> &buffers,
          const Mutant &wrong, TensorCore core, unsigned seed, Findings &findings)
        : x(at_x), y(at_y), z(at_z), tensor_core(core), mutant(wrong), n_threads_(n_threads),
          shared_(shared_bytes + 16), shadow_(shared_bytes / kGrain), buffers_(buffers), random_(seed),
          findings_(findings), threads_(n_threads), warps_((n_threads + 31) / 32) {
        std::memset(shared_.data(), 0xFF, shared_.size()); // not a number, in every type
    }

    const int x, y, z;
    const TensorCore tensor_core;
    const Mutant mutant;
    static inline Block *current = nullptr;

    // Runs all threads to their end; false when they cannot go on (a barrier that not all reach).
    bool run(const std::function<void()> &kernel) {
        current = this;
        std::vector<std::unique_ptr<Fiber>> fibers;
        for (int t = 0; t < n_threads_; t++) fibers.push_back(std::make_unique<Fiber>(kernel));
        fibers_ = &fibers;
        std::vector<int> order;
        for (;;) {
            order.clear();
            for (int t = 0; t < n_threads_; t++)
                if (!fibers[t]->done() && !threads_[t].waiting) order.push_back(t);
            if (order.empty()) {
                if (!release()) break;
                continue;
            }
            std::shuffle(order.begin(), order.end(), random_);
            for (const int t : order) {
                thread_ = t;
                fibers[t]->resume();
                if (fibers[t]->done()) threads_[t].ended = true;
            }
        }
        for (const Thread &t : threads_)
            if (!t.ended) {
                findings_.add("diverged: threads wait where others never come");
                return false;
            }
        return true;
    }

    int thread() const { return thread_; }
    char *shared() { return shared_.data() + (16 - reinterpret_cast<uintptr_t>(shared_.data()) % 16) % 16; }

    void sync_block(At site) {
        if (site == mutant.left_out) return;
        wait(kBlock, static_cast<int>(site));
        threads_[thread_].block_epoch++;
    }

    // All lanes of a warp put a value in; each sees all of them. KIND tells one sort of meeting from another.
    template <class T> const T *exchange(int kind, const T &mine) {
        static_assert(sizeof(T) <= kExchangeBytes, "room of an exchange");
        Warp &warp = warps_[thread_ / 32];
        auto *slots = reinterpret_cast<T *>(warp.bytes[warp.turn % 2]);
        slots[thread_ % 32] = mine;
        wait(kWarp, kind);
        return slots;
    }

    void read(const void *p, size_t size) {
        const long at = offset(p, size, "read");
        for (size_t i = 0; at >= 0 && i < size; i += kGrain) {
            Grain &b = shadow_[(at + i) / kGrain];
            const Thread &me = threads_[thread_];
            if (b.writer < 0) findings_.add("unwritten: shared memory read before anything was written");
            if (b.in_flight > 0) findings_.add("early: shared memory read before an asynchronous copy has landed");
            if (b.writer >= 0 && b.writer != thread_ && b.write_epoch == me.block_epoch)
                findings_.add("race: read without a barrier after another thread's write");
            if (b.read_epoch != me.block_epoch || b.reader < 0) {
                b.reader = thread_;
                b.read_epoch = me.block_epoch;
            } else if (b.reader != thread_) {
                b.reader = kMany;
            }
        }
    }
    void write(void *p, size_t size) {
        const long at = offset(p, size, "written");
        for (size_t i = 0; at >= 0 && i < size; i += kGrain) mark_written(at + i);
    }

    void copy_async(void *to, const void *from, size_t size, bool valid) {
        const char *bytes = valid ? global(from, size) : nullptr;
        const long at = offset(to, size, "written");
        if (at < 0) return;
        if (reinterpret_cast<uintptr_t>(to) % size || (valid && reinterpret_cast<uintptr_t>(from) % size))
            findings_.add("outside: an asynchronous copy's address is not aligned");
        for (size_t i = 0; i < size; i += kGrain) {
            mark_written(at + i);
            shadow_[(at + i) / kGrain].in_flight++;
        }
        Copy copy{static_cast<char *>(to), at, size, {}};
        if (bytes) std::memcpy(copy.bytes, bytes, size);
        threads_[thread_].open.push_back(copy);
    }
    void commit_async() {
        Thread &me = threads_[thread_];
        me.groups.push_back(std::move(me.open));
        me.open.clear();
    }
    void wait_async(size_t pending, At site) {
        if (site == mutant.left_out) return;
        if (site == mutant.waits_for_one_less) pending++;
        Thread &me = threads_[thread_];
        while (me.groups.size() > pending) {
            for (const Copy &copy : me.groups.front()) {
                std::memcpy(copy.to, copy.bytes, copy.size);
                for (size_t i = 0; i < copy.size; i += kGrain) {
                    Grain &b = shadow_[(copy.at + i) / kGrain];
                    b.in_flight--;
                    b.writer = thread_;
                    b.write_epoch = me.block_epoch;
                }
            }
            me.groups.pop_front();
        }
    }

    // Where the bytes of a global address lie; nullptr: nowhere, and that is noted.
    const char *global(const void *p, size_t size) {
        const auto *at = static_cast<const char *>(p);
        if (reinterpret_cast<uintptr_t>(p) % (size <= 16 ? size : 4))
            findings_.add("outside: a global address is not aligned for its type");
        const auto holds = [&](const Buffer &b) { return at >= b.begin && at + size <= b.end; };
        if (last_ < buffers_.size() && holds(buffers_[last_])) return at + buffers_[last_].moved;
        for (last_ = 0; last_ < buffers_.size(); last_++)
            if (holds(buffers_[last_])) return at + buffers_[last_].moved;
        findings_.add("outside: global memory that was not given to the launch");
        return nullptr;
    }

private:
    static constexpr int kNone = 0, kBlock = 1, kWarp = 2, kMany = 1 << 20;
    static constexpr size_t kExchangeBytes = 64, kGrain = 2; // every access is of whole grains, bytes
    struct Copy {
        char *to;
        long at;
        size_t size;
        char bytes[16];
    };
    struct Thread {
        bool ended = false;
        int waiting = kNone, where = 0;
        int block_epoch = 0;
        std::vector<Copy> open;
        std::deque<std::vector<Copy>> groups;
    };
    struct Warp {
        alignas(16) char bytes[2][32 * kExchangeBytes];
        int turn = 0;
    };
    struct Grain {
        int writer = -1, write_epoch = -1, reader = -1, read_epoch = -1, in_flight = 0;
    };

    void wait(int kind, int where) {
        Thread &me = threads_[thread_];
        me.waiting = kind;
        me.where = where;
        (*fibers_)[thread_]->yield();
    }

    // Lets the warps, or else the whole block, go on from where all of them wait. False when nobody can.
    bool release() {
        bool any = false;
        for (size_t w = 0; w < warps_.size(); w++) any = release_warp(w * 32) || any;
        return any || release_all();
    }
    bool release_warp(size_t first) {
        for (size_t t = first; t < first + 32; t++)
            if (threads_[t].waiting != kWarp || threads_[t].where != threads_[first].where) return false;
        for (size_t t = first; t < first + 32; t++) threads_[t].waiting = kNone;
        warps_[first / 32].turn++;
        return true;
    }
    bool release_all() {
        for (const Thread &t : threads_)
            if (t.waiting != kBlock || t.where != threads_[0].where) return false;
        for (Thread &t : threads_) t.waiting = kNone;
        return true;
    }

    void mark_written(long at) {
        Grain &b = shadow_[at / kGrain];
        const int epoch = threads_[thread_].block_epoch;
        if (b.writer >= 0 && b.writer != thread_ && b.write_epoch == epoch)
            findings_.add("race: written twice without a barrier between");
        if (b.reader >= 0 && b.reader != thread_ && b.read_epoch == epoch)
            findings_.add("race: written without a barrier after another thread's read");
        b.writer = thread_;
        b.write_epoch = epoch;
    }
    long offset(const void *p, size_t size, const char *what) {
        const long at = static_cast<const char *>(p) - shared();
        if (at >= 0 && at + size <= shadow_.size() * kGrain) {
            if (at % (size <= 16 ? size : 4)) findings_.add("outside: a shared address is not aligned for its type");
            return at;
        }
        findings_.add(std::string("outside: beyond shared memory ") + what);
        return -1;
    }

    int n_threads_;
    std::vector<char> shared_;
    std::vector<Grain> shadow_;
    const std::vector<Buffer> &buffers_;
    std::mt19937 random_;
    Findings &findings_;
    std::vector<Thread> threads_;
    std::vector<Warp> warps_;
    std::vector<std::unique_ptr<Fiber>> *fibers_ = nullptr;
    int thread_ = 0;
    size_t last_ = 0; // of the buffers, the one that was touched last
};

} // namespace paged_attn::gpu::emulate
