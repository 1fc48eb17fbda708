// The threads behind a plan.
#include "src/pool.h"

#include "tests/testing.h"

#include <chrono>
#include <ctime>
#include <vector>

using paged_attn::Pool;

TEST(every_thread_runs_the_job_once_per_run) {
    for (const int size : {1, 2, 3, 8}) {
        Pool pool(size);
        std::vector<int> runs(static_cast<size_t>(size), 0);
        for (int round = 0; round < 200; round++) {
            pool.run([](void *context, int index) { (*static_cast<std::vector<int> *>(context))[size_t(index)]++; }, &runs);
        }
        for (const int count : runs) EXPECT(count == 200, "%d of 200, %d threads", count, size);
    }
}

TEST(the_counter_gives_each_item_to_one_thread) {
    struct Shared {
        Pool pool{4};
        std::vector<int> taken = std::vector<int>(1000, 0), again = std::vector<int>(1000, 0);
    } shared;
    for (int round = 0; round < 20; round++) {
        shared.pool.run([](void *context, int index) {
            Shared &all = *static_cast<Shared *>(context);
            for (int i; (i = all.pool.take()) < 1000;) all.taken[size_t(i)]++;
            all.pool.meet();
            if (index == 0) all.pool.restart();
            all.pool.meet();
            for (int i; (i = all.pool.take()) < 1000;) all.again[size_t(i)]++;
        }, &shared);
    }
    for (const int count : shared.taken) EXPECT(count == 20, "%d of 20", count);
    for (const int count : shared.again) EXPECT(count == 20, "%d of 20 after a restart", count);
}

TEST(what_was_written_before_a_barrier_is_seen_behind_it) {
    struct Shared {
        Pool pool{3};
        int written[3] = {}, wrong = 0;
    } shared;
    shared.pool.run([](void *context, int index) {
        Shared &all = *static_cast<Shared *>(context);
        for (int round = 1; round <= 500; round++) {
            all.written[index] = round;
            all.pool.meet();
            if (index == 0) for (const int value : all.written) all.wrong += value != round;
            all.pool.meet();
        }
    }, &shared);
    EXPECT(shared.wrong == 0, "%d stale values", shared.wrong);
}

TEST(idle_threads_use_no_processor_time) {
    Pool pool(4);
    const auto work = [](void *, int) {};
    pool.run(work, nullptr);
    timespec pause{0, 20'000'000};
    nanosleep(&pause, nullptr); // the spinning ends
    const std::clock_t before = std::clock();
    pause.tv_nsec = 300'000'000;
    nanosleep(&pause, nullptr);
    const double used = double(std::clock() - before) / CLOCKS_PER_SEC;
    EXPECT(used < 0.02, "%.3f s of 0.3 s", used);
    pool.run(work, nullptr);
}
