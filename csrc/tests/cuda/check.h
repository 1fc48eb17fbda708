// Checks that go on after a failure, and say where.
#pragma once
#include <cstdio>
#include <string>

inline int n_failed_checks = 0;

inline bool check(bool holds, const std::string &what, const char *file, int line) {
    if (!holds) {
        n_failed_checks++;
        std::printf("FAILED %s:%d: %s\n", file, line, what.c_str());
    }
    return holds;
}
#define CHECK(condition) check((condition), #condition, __FILE__, __LINE__)
#define CHECK_SAYS(call, status, words)                                                                                \
    do {                                                                                                               \
        const pa_status check_got = (call);                                                                            \
        const std::string check_text = pa_cuda_last_error();                                                           \
        check(check_got == (status) && check_text.find(words) != std::string::npos,                                    \
              std::string(#call " answers ") + std::to_string(check_got) + ": " + check_text, __FILE__, __LINE__);     \
    } while (false)
