// A thread that may be left behind: a call of a file system that hangs cannot be ended. All that the thread uses is its own.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace kvt {

constexpr std::chrono::milliseconds most_ending { 1000 }; // for what a thread is doing, when nobody wants it any more

class worker {
public:
    worker() = default;
    ~worker() { leave(std::chrono::milliseconds(0)); }
    worker(const worker &) = delete;
    worker & operator=(const worker &) = delete;

    // `work` holds what it uses, and throws nothing.
    template <typename Work> void start(Work work) {
        auto its = std::make_shared<mark>();
        thread_ = std::thread([its, own = std::move(work)]() mutable {
            {
                const Work done = std::move(own); // what it holds goes before it says that it has ended
                done();
            }
            std::lock_guard<std::mutex> lock(its->mutex);
            its->ended = true;
            its->changed.notify_all();
        });
        mark_ = std::move(its);
    }

    // Waits until it has ended, at most so long; then it goes on alone. True if it has ended.
    bool leave(std::chrono::milliseconds most = most_ending) {
        if (!thread_.joinable()) {
            return true;
        }
        std::unique_lock<std::mutex> lock(mark_->mutex);
        const bool ended = mark_->changed.wait_for(lock, most, [this] { return mark_->ended; });
        lock.unlock();
        if (ended) {
            thread_.join();
        } else {
            thread_.detach();
        }
        return ended;
    }

private:
    struct mark {
        std::mutex mutex;
        std::condition_variable changed;
        bool ended = false;
    };
    std::shared_ptr<mark> mark_;
    std::thread thread_;
};

} // namespace kvt
