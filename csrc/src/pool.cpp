#include "src/pool.h"

#include <chrono>
#include <cstddef>

namespace paged_attn {

namespace {

// Longer than the gap between two layers of a small model, far shorter than anyone would notice on a power meter.
constexpr std::chrono::microseconds kSpin{100};
constexpr int kPausesPerLook = 32; // at the clock

inline void pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

} // namespace

Pool::Pool(int size) : size_(size), spins_(static_cast<unsigned>(size) <= std::thread::hardware_concurrency()) {
    try {
        threads_.reserve(static_cast<size_t>(size) - 1);
        for (int index = 1; index < size; index++) threads_.emplace_back([this, index] { work(index); });
    } catch (...) {
        end();
        throw;
    }
}

Pool::~Pool() { end(); }

void Pool::end() noexcept {
    ending_.store(true, std::memory_order_relaxed);
    advance(runs_);
    for (std::thread &thread : threads_) thread.join();
}

void Pool::work(int index) noexcept {
    for (uint32_t run = 0;; run++) {
        await(runs_, run);
        if (ending_.load(std::memory_order_relaxed)) return;
        job_(context_, index);
        meet();
    }
}

void Pool::run(Job job, void *context) noexcept {
    job_ = job;
    context_ = context;
    restart();
    if (size_ > 1) advance(runs_);
    job(context, 0);
    meet();
}

void Pool::meet() noexcept {
    if (size_ == 1) return;
    const uint32_t meeting = meetings_.load(std::memory_order_relaxed); // cannot change before this thread arrives
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) return await(meetings_, meeting);
    arrived_.store(0, std::memory_order_relaxed);
    advance(meetings_);
}

// Under the mutex, so that nobody falls asleep between looking and waiting.
void Pool::advance(std::atomic<uint32_t> &phase) noexcept {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        phase.fetch_add(1, std::memory_order_release);
    }
    changed_.notify_all();
}

void Pool::await(const std::atomic<uint32_t> &phase, uint32_t old) noexcept {
    const auto changed = [&] { return phase.load(std::memory_order_acquire) != old; };
    if (spins_) {
        const auto until = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < kPausesPerLook; i++) {
                if (changed()) return;
                pause();
            }
        } while (std::chrono::steady_clock::now() < until);
    }
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, changed);
}

} // namespace paged_attn
