// Streams and events: what is put into a stream is done in order, by a thread of its own, each job as late as chance has it.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

namespace fakegpu {

class Stream {
public:
    // `number` among the streams of a device says which delay is its.
    Stream(int device, size_t number);
    ~Stream(); // when all is done
    Stream(const Stream &) = delete;
    Stream &operator=(const Stream &) = delete;

    void put(std::function<void()> job);
    void synchronize();

private:
    void work();

    const long most_delay_us_;
    std::mt19937 random_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> jobs_; // the first is being done
    bool ends_ = false;
    std::thread worker_;
};

// As CUDA's: a wait is for what was last recorded before it was put; never recorded, it waits for nothing.
class Event {
public:
    Event() : state_(std::make_shared<State>()) {}
    void record(Stream &stream);
    void wait(Stream &stream);
    void synchronize();

private:
    struct State {
        std::mutex mutex;
        std::condition_variable changed;
        long recorded = 0, done = 0;
        void await(long which);
    };
    std::shared_ptr<State> state_; // jobs may outlive the event
};

} // namespace fakegpu
