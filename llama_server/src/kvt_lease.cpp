#include "kvt_lease.h"

#include <algorithm>
#include <utility>

namespace kvt {

namespace {

constexpr milliseconds lease_timeout { 200 };
constexpr milliseconds least_third { 50 };
constexpr milliseconds for_ever { 3600000 };

} // namespace

lease::lease(std::shared_ptr<connection> from, uint64_t lease_id)
    : from_(std::move(from)), id_(lease_id), third_(std::max(milliseconds(from_->greeting().lease_ms/3), least_third)),
      over_(lease_id == 0), next_(clock::now() + third_) {}

void lease::renew_in_time() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (over_ || clock::now() < next_) {
            return;
        }
        next_ = clock::now() + third_; // no other thread asks meanwhile, nor waits for this one
    }
    const bool lasts = from_->renew(id_, lease_timeout) == status::ok;
    std::lock_guard<std::mutex> lock(mutex_);
    over_ = over_ || !lasts;
    next_ = clock::now() + third_;
}

milliseconds lease::until_then() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return over_ ? for_ever : std::max(std::chrono::duration_cast<milliseconds>(next_ - clock::now()), milliseconds(1));
}

void lease::damaged(uint32_t number) { from_->damaged(id_, number, lease_timeout); }

void lease::release() {
    if (id_ != 0) {
        from_->release(id_, lease_timeout);
    }
}

} // namespace kvt
