// The kernels in lockstep emulation against f64: every test, and then every meeting point left out on purpose.
//
//     emulate [--seeds N]   all tests with N random orders each; exit 1 when one fails
//     emulate --mutants     each meeting point left out in turn; exit 1 when nothing notices one of them
#include "emulated.h"

#include <cstdlib>

namespace paged_attn::gpu::test {

std::vector<Test> &tests() {
    static std::vector<Test> all;
    return all;
}

constexpr double kMostError = 1e-5; // a tenth of what the kernels promise

std::string describe(const Test &test) {
    static const char *const kMasks[] = {"every cell", "causal", "window", "sequences", "dense", "all hidden"};
    const CaseSpec &s = test.spec;
    char text[200];
    std::snprintf(text, sizeof text, "%-30s %3d queries %2d/%d heads %3d cells, %s, %d splits, %d chunks",
                  test.name.c_str(), s.n_q, s.n_head, s.n_kv_head, s.n_cells, kMasks[static_cast<int>(s.mask)],
                  s.n_splits, s.n_chunks);
    return text;
}

bool passes(const Outcome &outcome) {
    return outcome.findings.texts.empty() && outcome.error <= kMostError; // a NaN is not
}

int run_all(int n_seeds) {
    int n_failed = 0;
    for (const Test &test : tests())
        for (int seed = 1; seed <= n_seeds; seed++) {
            const Outcome outcome = test.run(test.spec, test.kernel, At::none, static_cast<unsigned>(seed));
            const bool ok = passes(outcome);
            n_failed += !ok;
            std::printf("%s  %s  %.2e\n", ok ? "ok    " : "FAILED", describe(test).c_str(), outcome.error);
            for (const auto &text : outcome.findings.texts) std::printf("        %s\n", text.c_str());
        }
    std::printf("%zu tests, %d orders each, %d failed\n", tests().size(), n_seeds, n_failed);
    return n_failed > 0;
}

int run_mutants() {
    int n_missed = 0;
    for (int site = 1; site < static_cast<int>(At::count); site++) {
        const Test *caught_by = nullptr;
        std::string how;
        for (const Test &test : tests()) {
            const Outcome outcome = test.run(test.spec, test.kernel, static_cast<At>(site), 1);
            if (passes(outcome)) continue;
            caught_by = &test;
            how = outcome.findings.texts.empty() ? "wrong result" : *outcome.findings.texts.begin();
            break;
        }
        n_missed += caught_by == nullptr;
        std::printf("%s  without %-24s %s\n", caught_by ? "caught" : "MISSED", site_name(static_cast<At>(site)),
                    caught_by ? (caught_by->name + ": " + how).c_str() : "");
    }
    std::printf("%d mutants, %d missed\n", static_cast<int>(At::count) - 1, n_missed);
    return n_missed > 0;
}

} // namespace paged_attn::gpu::test

int main(int n, char **arguments) {
    using namespace paged_attn::gpu::test;
    if (n == 2 && std::string(arguments[1]) == "--mutants") return run_mutants();
    if (n == 3 && std::string(arguments[1]) == "--seeds") return run_all(std::atoi(arguments[2]));
    if (n == 1) return run_all(1);
    std::fprintf(stderr, "usage: emulate [--seeds N | --mutants]\n");
    return 2;
}
