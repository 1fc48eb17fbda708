// When parts of a request are stored while it is computed, by a clock that is made up.
//   kvt_parts AFTER TURN COPY ALL   the first part after AFTER seconds, as the variable says them; each turn of the main loop
//                                   computes a row in TURN ms, and takes COPY ms to hand over each row; ALL ms of computing
// Says "parts N, handed ROWS of ROWS, cost MS of MS, longest MS, first after MS".
#include "../src/kvt_progress.h"

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <string>

int main(int argc, char ** argv) {
    if (argc < 5) {
        std::cout << "kvt_parts AFTER TURN COPY ALL" << std::endl;
        return 1;
    }
    using std::chrono::duration_cast;
    using ms = std::chrono::duration<double, std::milli>;
    using kvt::progress;
    const auto nanoseconds = [](const char * text) { return duration_cast<progress::nanoseconds>(ms(std::stod(text))); };
    const auto turn = nanoseconds(argv[2]);
    const auto copy = nanoseconds(argv[3]);
    const auto all = nanoseconds(argv[4]);
    const progress::nanoseconds step = std::chrono::milliseconds(20);
    const progress::time_point began {};
    progress parts;
    parts.begin(began, kvt::progress_after(argv[1]), 0);
    progress::nanoseconds cost {};
    progress::nanoseconds longest {};
    progress::nanoseconds first {};
    int count = 0;
    uint32_t rows = 0;
    for (auto now = began; now - began < all;) {
        now += turn;
        ++rows;
        for (bool more = true; more && parts.allowed(now).count() > 0;) { // as the main loop's turns
            const auto most = std::min(parts.allowed(now), step);
            const auto begin = now;
            uint32_t handed = parts.handed();
            do {
                now += copy;
                ++handed;
            } while (handed < rows && now - begin < most);
            more = handed < rows;
            parts.note(begin, now, handed, more);
            count += more ? 0 : 1;
            first = first.count() == 0 ? begin - began : first;
            longest = std::max(longest, now - begin);
            cost += now - begin;
        }
    }
    const auto said = [](progress::nanoseconds time) { return std::to_string(duration_cast<std::chrono::milliseconds>(time).count()); };
    std::cout << "parts " << count << ", handed " << parts.handed() << " of " << rows << ", cost " << said(cost) << " of " << said(all)
              << ", longest " << said(longest) << ", first after " << said(first) << std::endl;
    return 0;
}
