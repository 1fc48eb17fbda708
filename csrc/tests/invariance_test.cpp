// The bits of a row depend on that row alone: not on how a prompt is cut, threads, other sequences, where cells lie, nor
// on the instruction set (but for `scalar`). invariance_test runs what fits into a minute; PA_WIDE=1 the whole product of
// types, head sizes, groups, masks and cuts (an hour), PA_WIDE=3 a third of it.
#include "tests/conversation.h"
#include "tests/problem.h"
#include "tests/testing.h"

#include <cstdlib>
#include <cstring>

namespace {

constexpr int kCuts[] = {1, 2, 3, 7, 16, 17, 31, 64, 100, 300, 512};
constexpr int kThreads[] = {1, 2, 3, 7};
constexpr pa_dtype kTypes[] = {PA_F16, PA_BF16, PA_F32, PA_Q8_0, PA_Q4_0};
constexpr int kHeadSizes[] = {64, 80, 96, 128, 256};

bool wide() { return std::getenv("PA_WIDE") != nullptr; }
uint64_t stride() { return wide() ? uint64_t(std::atoi(std::getenv("PA_WIDE"))) : 24; } // of the stories
bool served(pa_dtype type, int d) { return type < PA_Q8_0 || d % 32 == 0; }

size_t differing(const std::vector<float> &a, const std::vector<float> &b) {
    if (a.size() != b.size()) return 1;
    size_t n = 0;
    for (size_t i = 0; i < a.size(); i++) n += std::memcmp(&a[i], &b[i], sizeof a[i]) != 0;
    return n;
}

// Every cut of `conversation` as `layout` gives what each of its sequences gives alone in cells that ascend (`plain`), or
// what the largest cut of the same layout gives.
void expect_same(const Conversation &conversation, const Layout &layout, bool as_alone = true) {
    const Story &story = conversation.story;
    std::vector<std::vector<float>> alone;
    for (const char *isa : usable_isas()) {
        const bool scalar = !std::strcmp(isa, "scalar");
        if (scalar && story.seed % 16 != 1) continue; // slow
        for (int s = 0; as_alone && s < int(story.lengths.size()); s++) {
            const std::vector<float> rows = conversation.of_sequence(conversation.compute(Layout(), 512, 2, isa, s), s);
            if (size_t(s) == alone.size()) alone.push_back(rows);
            EXPECT(scalar || differing(rows, alone[size_t(s)]) == 0, "%s and the first: sequence %d: %s", isa, s, story.text().c_str());
            alone[size_t(s)] = rows;
        }
        const std::vector<float> whole = as_alone ? std::vector<float>() : conversation.compute(layout, 512, 2, isa);
        int turn = int(story.seed);
        for (const int cut : kCuts) {
            turn++;
            if (!wide() && turn % 3 != 0) continue;
            const int threads = cut < 16 ? 1 + turn % 2 : kThreads[turn % 4]; // more than cores is slow for many runs
            const std::vector<float> rows = conversation.compute(layout, cut, threads, isa);
            if (!as_alone) EXPECT(differing(rows, whole) == 0, "%s: cut %d, %d threads: %zu values differ: %s", isa, cut, threads, differing(rows, whole), story.text().c_str());
            for (int s = 0; as_alone && s < int(story.lengths.size()); s++) {
                if (s > 0 && story.shared > 0) continue; // checked below: their first rows are computed once
                const size_t n = differing(conversation.of_sequence(rows, s), alone[size_t(s)]);
                EXPECT(n == 0, "%s: cut %d, %d threads, sequence %d: %zu values differ: %s", isa, cut, threads, s, n, story.text().c_str());
            }
            for (int s = 1; as_alone && story.shared > 0 && s < int(story.lengths.size()); s++) {
                const auto skip = long(story.shared * story.n_head * story.d);
                std::vector<float> its = conversation.of_sequence(rows, s), expected = alone[size_t(s)];
                its.erase(its.begin(), its.begin() + skip);
                expected.erase(expected.begin(), expected.begin() + skip);
                EXPECT(differing(its, expected) == 0, "%s: cut %d, sequence %d after the shared tokens: %s", isa, cut, s, story.text().c_str());
            }
        }
    }
}

// All types, head sizes and groups; fewer of them, in turns, in the quick set.
template <class F> void each_story(F &&check) {
    uint64_t seed = 0;
    for (const pa_dtype type : kTypes)
        for (const int d : kHeadSizes)
            for (int group = 1; group <= 8; group++) {
                seed++;
                if (!served(type, d) || seed % stride() != 1 % stride()) continue;
                Story story;
                story.seed = seed;
                story.type = type;
                story.d = d;
                story.n_kv_head = 1 + int(seed % 2);
                story.n_head = story.n_kv_head * group;
                story.lengths = {wide() ? 850 : 800 + int(seed % 90)};
                story.query_deviation = seed % 3 == 0 ? 300.0 : seed % 3 == 1 ? 1.0 : 8.0;
                story.sinks = seed % 4 == 1;
                story.softcap = seed % 5 == 2 ? 30.0f : 0.0f;
                check(story);
            }
}

} // namespace

TEST(a_prompt_in_any_cut) {
    each_story([](const Story &story) { expect_same(Conversation(story), Layout()); });
}

TEST(a_window_in_any_cut) {
    each_story([](Story story) {
        story.window = 200;
        expect_same(Conversation(story), Layout());
    });
}

TEST(three_sequences_mixed_are_as_each_alone) {
    each_story([](Story story) {
        story.lengths = {story.lengths[0], 310, 97};
        expect_same(Conversation(story), Layout{false, 1, true, true});
        if (story.seed % 2 == 0) expect_same(Conversation(story), Layout());
    });
}

TEST(three_sequences_with_a_common_beginning) {
    each_story([](Story story) {
        story.lengths = {story.lengths[0], 500, 197};
        story.shared = 150;
        expect_same(Conversation(story), Layout{story.seed % 2 == 1, 1, true, true});
    });
}

TEST(cells_in_any_order_when_positions_are_given) {
    each_story([](Story story) {
        if (story.seed % 3 == 0) story.window = 130;
        expect_same(Conversation(story), Layout{true, 1, true, true});
    });
}

TEST(holes_between_the_cells_when_positions_are_given) {
    each_story([](const Story &story) { expect_same(Conversation(story), Layout{false, 3, true, true}); });
}

TEST(without_positions_any_cut_of_the_same_cells) { // by cell index: as each other, not as the plain cells
    each_story([](Story story) {
        expect_same(Conversation(story), Layout{false, 2, true, false}, false);
        story.lengths = {story.lengths[0], 310, 97};
        expect_same(Conversation(story), Layout{true, 1, true, false}, false);
    });
}

TEST(a_long_prompt_in_waves_of_chunks) { // more chunks than states are kept for at a time, in decode and in prefill
    for (const int n_kv_head : {1, 32}) { // prefill with few panels; decode of 12 queries with groups of one head
        Story story;
        story.n_head = n_kv_head == 1 ? 4 : n_kv_head;
        story.n_kv_head = n_kv_head;
        story.d = 16;
        story.lengths = {n_kv_head == 1 ? 8500 : 4200};
        const Conversation conversation(story);
        const std::vector<float> whole = conversation.compute(Layout(), 512, 1, "auto");
        for (const int cut : {12, 64, 128}) {
            const size_t n = differing(conversation.compute(Layout(), cut, 7, "auto"), whole);
            EXPECT(n == 0, "cut %d: %zu values differ: %s", cut, n, story.text().c_str());
        }
    }
}
