// When parts of a request are stored while it is computed. A short prompt is left alone: storing takes cores from computing.
// Of the main loop it takes a hundredth of the time that the request has taken so far; where copying rows takes more than
// that, computing them again takes little.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>

namespace kvt {

constexpr double progress_seconds = 2;          // that a request is computed before its first part is stored
constexpr double most_progress_seconds = 86400; // more, or what is no number, means the usual ones
constexpr int progress_parts = 64;              // a part is stored each time the request has taken so much longer
constexpr int progress_cost = 100;              // the main loop's part of it
constexpr std::chrono::milliseconds least_between { 250 };

// The first part's seconds by what OLLAMA_KV_TIER_PROGRESS_SECONDS says.
inline std::chrono::nanoseconds progress_after(const char * said) {
    double seconds = progress_seconds;
    if (said != nullptr && *said != '\0') {
        char * end = nullptr;
        const double value = std::strtod(said, &end);
        seconds = *end == '\0' && value >= 0 && value <= most_progress_seconds ? value : seconds;
    }
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
}

class progress {
public:
    using time_point = std::chrono::steady_clock::time_point;
    using nanoseconds = std::chrono::nanoseconds;

    // The slot holds `rows` of which nothing is to be done; others are computed from now on.
    void begin(time_point now, nanoseconds after, uint32_t rows) {
        began_ = now;
        next_ = now + after;
        spent_ = {};
        handed_ = rows;
    }

    // Rows before it are stored, or about to be.
    uint32_t handed() const { return handed_; }

    // Time for a part. So much of it the main loop may take now: 0 or less for none.
    nanoseconds allowed(time_point now) const { return now < next_ ? nanoseconds(0) : (now - began_)/progress_cost - spent_; }

    // What the main loop did took from `begin` to `end`. `more`: there was no time for all of it.
    void note(time_point begin, time_point end, uint32_t handed, bool more) {
        spent_ += end - begin;
        handed_ = handed;
        if (!more) {
            next_ = end + std::max<nanoseconds>((end - began_)/progress_parts, least_between);
        }
    }

private:
    time_point began_;
    time_point next_;
    nanoseconds spent_ {};
    uint32_t handed_ = 0;
};

} // namespace kvt
