// Just enough of a test framework: TEST(name) { EXPECT(condition, "values: %d", value); }
#pragma once
#include <cstdio>

namespace testing {

struct Test {
    Test(const char *its_name, void (*its_body)());
    const char *name;
    void (*body)();
    Test *next;
};

// Counted; the first few of a test are printed.
bool failed(const char *file, int line, const char *condition);

} // namespace testing

#define TEST(name)                                                                                                     \
    static void test_##name();                                                                                         \
    static testing::Test registered_##name(#name, test_##name);                                                        \
    static void test_##name()

#define EXPECT(condition, ...)                                                                                         \
    do {                                                                                                               \
        if (!(condition) && testing::failed(__FILE__, __LINE__, #condition)) {                                         \
            std::printf("    " __VA_ARGS__);                                                                           \
            std::printf("\n");                                                                                         \
        }                                                                                                              \
    } while (false)
