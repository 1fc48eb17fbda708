#include "stream.h"
#include "settings.h"

#include <algorithm>
#include <chrono>

namespace fakegpu {
namespace {

long most_delay_of(size_t number) {
    const std::vector<long> &delays = settings().delay_us;
    return delays[std::min(number, delays.size() - 1)];
}

} // namespace

Stream::Stream(int device, size_t number)
    : most_delay_us_(most_delay_of(number)),
      random_(settings().seed * 1000003u + static_cast<unsigned>(device) * 1009u + static_cast<unsigned>(number)),
      worker_([this] { work(); }) {}

Stream::~Stream() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ends_ = true;
    }
    changed_.notify_all();
    worker_.join();
}

void Stream::put(std::function<void()> job) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        jobs_.push_back(std::move(job));
    }
    changed_.notify_all();
}

void Stream::synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return jobs_.empty(); });
}

void Stream::work() {
    std::uniform_int_distribution<long> delay_us(0, most_delay_us_);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] { return ends_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        const std::function<void()> &job = jobs_.front(); // stays where it is when others are put behind it
        lock.unlock();
        if (most_delay_us_ > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us(random_)));
        job();
        lock.lock();
        jobs_.pop_front();
        changed_.notify_all();
    }
}

void Event::State::await(long which) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return done >= which; });
}

void Event::record(Stream &stream) {
    long which = 0;
    {
        std::lock_guard<std::mutex> lock(state_->mutex);
        which = ++state_->recorded;
    }
    stream.put([state = state_, which] {
        std::lock_guard<std::mutex> lock(state->mutex);
        state->done = std::max(state->done, which);
        state->changed.notify_all();
    });
}

void Event::wait(Stream &stream) {
    std::lock_guard<std::mutex> lock(state_->mutex);
    stream.put([state = state_, which = state_->recorded] { state->await(which); });
}

void Event::synchronize() {
    long which = 0;
    {
        std::lock_guard<std::mutex> lock(state_->mutex);
        which = state_->recorded;
    }
    state_->await(which);
}

} // namespace fakegpu
