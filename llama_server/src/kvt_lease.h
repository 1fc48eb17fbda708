// The lease on files that some threads read. The sidecar keeps them for so long as it said; who reads for longer says so in
// time. Without it what is left may be gone, and is computed.
#pragma once

#include "kvt_client.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>

namespace kvt {

class lease {
public:
    // `lease_id` as the client was answered just now; 0: there is none.
    lease(std::shared_ptr<connection> from, uint64_t lease_id);

    // Between two parts of what is read, and while a thread waits. Asks once a third of the lease is over; one of the
    // threads does.
    void renew_in_time();

    milliseconds until_then() const; // how long a thread may wait without

    void damaged(uint32_t number); // file of the answer
    void release();

private:
    using clock = std::chrono::steady_clock;

    const std::shared_ptr<connection> from_;
    const uint64_t id_;
    const milliseconds third_;
    mutable std::mutex mutex_; // of the next two
    bool over_; // it cannot be renewed
    clock::time_point next_;
};

} // namespace kvt
