// The algebra of attention state: what every split of the cells rests on.
#include "paged_attn/attn_state.h"
#include "paged_attn/paged_attn.h"
#include "tests/testing.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

namespace {

constexpr int kD = 16;

struct State {
    float m = paged_attn::kEmptyM, l = 0.0f;
    float o[kD] = {};
};

State merged(State a, const State &b) {
    EXPECT(pa_state_merge(1, kD, &a.m, &a.l, a.o, &b.m, &b.l, b.o) == PA_OK, "%s", pa_last_error());
    return a;
}

std::vector<float> finished(const State &a, const float *sink = nullptr) {
    std::vector<float> out(kD);
    EXPECT(pa_state_finish(1, kD, &a.m, &a.l, a.o, sink, out.data()) == PA_OK, "%s", pa_last_error());
    return out;
}

struct Cells {
    std::vector<double> logit; // natural
    std::vector<float> v;      // [n][kD]

    Cells(size_t n, double deviation, unsigned seed) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        for (size_t i = 0; i < n; i++) logit.push_back(double(float(deviation) * normal(random)));
        for (size_t i = 0; i < n * kD; i++) v.push_back(0.3f + normal(random));
    }

    State state(size_t i) const { // of the one cell
        State one;
        one.m = float(logit[i]) * paged_attn::kLog2e;
        one.l = 1.0f;
        std::copy_n(v.begin() + long(i * kD), kD, one.o);
        return one;
    }

    std::vector<double> softmax() const {
        const double largest = *std::max_element(logit.begin(), logit.end());
        std::vector<double> out(kD);
        double total = 0.0;
        for (size_t i = 0; i < logit.size(); i++) {
            const double weight = std::exp(logit[i] - largest);
            total += weight;
            for (size_t c = 0; c < kD; c++) out[c] += weight * double(v[i * kD + c]);
        }
        for (double &value : out) value /= total;
        return out;
    }
};

double error(const std::vector<float> &a, const std::vector<double> &b) {
    double sum = 0.0, norm = 0.0;
    for (size_t i = 0; i < b.size(); i++) {
        sum += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
        norm += b[i] * b[i];
    }
    return std::sqrt(sum / norm);
}

std::vector<double> wide(const std::vector<float> &a) { return {a.begin(), a.end()}; }

bool same(const State &a, const State &b) {
    return a.m == b.m && a.l == b.l && std::equal(a.o, a.o + kD, b.o);
}

State tree(const std::vector<State> &states, size_t from, size_t to) {
    if (to - from == 1) return states[from];
    const size_t middle = from + (to - from) / 2;
    return merged(tree(states, from, middle), tree(states, middle, to));
}

} // namespace

TEST(the_empty_state_changes_nothing_on_either_side) {
    const State some = merged(Cells(3, 5.0, 1).state(0), Cells(3, 5.0, 1).state(2));
    EXPECT(same(merged(some, State()), some), "on the right");
    EXPECT(same(merged(State(), some), some), "on the left");
}

TEST(two_empty_states_are_empty_and_finish_as_zero) {
    const State none = merged(State(), State());
    EXPECT(same(none, State()), "m %g l %g", double(none.m), double(none.l));
    for (const float value : finished(none)) EXPECT(value == 0.0f, "%g", double(value));
}

TEST(one_cell_finishes_as_its_value) {
    const Cells cells(1, 30.0, 2);
    const std::vector<float> out = finished(cells.state(0));
    EXPECT(std::equal(out.begin(), out.end(), cells.v.begin()), "first value %g", double(out[0]));
}

TEST(a_cell_with_logit_minus_infinity_takes_no_weight) {
    State hidden = Cells(1, 1.0, 3).state(0);
    hidden.m = -INFINITY;
    hidden.l = 0.0f;
    const State some = Cells(2, 1.0, 3).state(1);
    EXPECT(same(merged(some, hidden), some), "on the right");
    EXPECT(same(merged(hidden, some), some), "on the left");
}

TEST(merging_commutes_bit_for_bit) {
    for (unsigned seed = 0; seed < 1000; seed++) {
        const Cells cells(2, 40.0, seed);
        const State ab = merged(cells.state(0), cells.state(1)), ba = merged(cells.state(1), cells.state(0));
        EXPECT(same(ab, ba), "seed %u", seed);
    }
}

TEST(any_order_and_any_tree_agree) {
    for (const double deviation : {0.1, 1.0, 30.0, 300.0}) {
        const Cells cells(1000, deviation, 5);
        std::vector<State> states;
        for (size_t i = 0; i < 1000; i++) states.push_back(cells.state(i));
        const std::vector<double> whole = wide(finished(tree(states, 0, states.size())));
        const double bound = 1e-6 + 1e-7 * deviation; // exp2 of a rounded difference
        EXPECT(error(finished(tree(states, 0, states.size())), cells.softmax()) < 10 * bound, "deviation %g", deviation);
        std::mt19937 random(6);
        for (int round = 0; round < 20; round++) {
            std::shuffle(states.begin(), states.end(), random);
            const double apart = error(finished(tree(states, 0, states.size())), whole);
            EXPECT(apart < bound, "deviation %g: orders differ by %g", deviation, apart);
        }
    }
}

TEST(a_hundred_thousand_chunks_one_after_another) {
    for (const double deviation : {1.0, 20.0}) {
        const Cells cells(100000, deviation, 7);
        State all;
        std::vector<State> states;
        for (size_t i = 0; i < cells.logit.size(); i++) {
            states.push_back(cells.state(i));
            all = merged(all, states.back());
        }
        const double in_line = error(finished(all), cells.softmax());
        const double as_tree = error(finished(tree(states, 0, states.size())), cells.softmax());
        EXPECT(in_line < 5e-4, "deviation %g: %g in line", deviation, in_line); // 10^5 roundings of f32
        EXPECT(as_tree < 5e-6, "deviation %g: %g as a tree", deviation, as_tree);
    }
}

TEST(the_reference_of_a_state_is_free) {
    const Cells cells(2, 3.0, 8);
    State moved = cells.state(0);
    moved.m -= 10.0f; // the same state with another reference: l and o are 2^10 times as large
    moved.l *= 1024.0f;
    for (float &value : moved.o) value *= 1024.0f;
    const std::vector<float> out = finished(merged(moved, cells.state(1)));
    EXPECT(error(out, cells.softmax()) < 1e-6, "error %g", error(out, cells.softmax()));
}

TEST(a_sink_takes_weight_and_gives_no_value) {
    const Cells cells(1, 1.0, 9);
    const float as_large = float(cells.logit[0]), larger = 1000.0f, none = -INFINITY;
    const std::vector<float> half = finished(cells.state(0), &as_large);
    for (size_t i = 0; i < kD; i++) EXPECT(std::fabs(half[i] - cells.v[i] / 2) < 1e-6f, "%g", double(half[i]));
    for (const float value : finished(cells.state(0), &larger)) EXPECT(value == 0.0f, "%g", double(value));
    for (const float value : finished(State(), &larger)) EXPECT(value == 0.0f, "%g", double(value));
    EXPECT(finished(cells.state(0), &none) == finished(cells.state(0)), "a sink of -inf is none");
}
