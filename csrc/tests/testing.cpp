// main of a test program: runs the tests whose name contains the argument, all without one.
#include "tests/testing.h"

#include <chrono>
#include <cstring>

namespace testing {

static Test *first = nullptr, **end = &first;
static int failures = 0; // of the running test
constexpr int kShown = 5;

Test::Test(const char *its_name, void (*its_body)()) : name(its_name), body(its_body), next(nullptr) {
    *end = this; // in the order of the file
    end = &next;
}

bool failed(const char *file, int line, const char *condition) {
    if (++failures > kShown) return false;
    std::printf("  %s:%d: not so: %s\n", file, line, condition);
    return true;
}

} // namespace testing

int main(int argc, char **argv) {
    using clock = std::chrono::steady_clock;
    int run = 0, bad = 0;
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    for (testing::Test *test = testing::first; test; test = test->next) {
        if (argc > 1 && !std::strstr(test->name, argv[1])) continue;
        testing::failures = 0;
        const auto start = clock::now();
        test->body();
        const double seconds = std::chrono::duration<double>(clock::now() - start).count();
        std::printf("%-60s %s %6.2f s\n", test->name, testing::failures ? "FAILED" : "ok    ", seconds);
        if (testing::failures > testing::kShown) std::printf("  ... %d failures in all\n", testing::failures);
        run++;
        bad += testing::failures > 0;
    }
    std::printf("%d tests, %d failed\n", run, bad);
    return run == 0 || bad > 0;
}
