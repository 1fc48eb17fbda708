// Threads that outlive a run. They wait for the next one by spinning for a moment, then asleep.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace paged_attn {

// One run at a time. The caller of `run` is thread 0 of `size`.
class Pool {
  public:
    using Job = void (*)(void *context, int index);

    explicit Pool(int size); // std::system_error, std::bad_alloc: no thread is left behind
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    // job(context, index) on every thread; returns when all have ended. What they wrote is visible then.
    void run(Job job, void *context) noexcept;

    // For the jobs. `meet` is a barrier over all threads; `take` counts up from 0; after `restart`, which one thread
    // calls, from 0 again, and all have to meet before the next `take`.
    void meet() noexcept;
    int take() noexcept { return counter_.fetch_add(1, std::memory_order_relaxed); }
    void restart() noexcept { counter_.store(0, std::memory_order_relaxed); }

    int size() const noexcept { return size_; }

  private:
    void work(int index) noexcept;
    void end() noexcept;
    void advance(std::atomic<uint32_t> &phase) noexcept;
    void await(const std::atomic<uint32_t> &phase, uint32_t old) noexcept;

    const int size_;
    const bool spins_; // with more threads than cores, spinning takes the core from whom one waits for
    Job job_ = nullptr; // read by the others after `runs_` has changed
    void *context_ = nullptr;
    std::atomic<uint32_t> runs_{0}, meetings_{0};
    std::atomic<int> arrived_{0}, counter_{0};
    std::atomic<bool> ending_{false};
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::thread> threads_;
};

} // namespace paged_attn
