// Two rules of the launcher by themselves: into how many splits a run is cut, and division without a division.
#include "check.h"
#include "emulate/device.h"

#include "cuda/host/divisor.h"
#include "cuda/host/splits.h"
#include "cuda/rows.cuh"

#include <algorithm>
#include <random>

using namespace paged_attn::gpu;

namespace {

// The GPU is as busy as whole turns allow, on the numbers of multiprocessors that there are.
void splits() {
    const struct {
        const char *name;
        int n_multiprocessors;
    } gpus[] = {{"M6000", 24}, {"1070", 15}, {"2080", 46},  {"3060", 28}, {"3090", 82},     {"4070", 46},
                {"4090", 128}, {"5090", 170}, {"H100", 132}, {"A100", 108}, {"H100 PCIe", 114}};
    double worst = 1.0;
    for (const auto &gpu : gpus)
        for (const int blocks_per_multiprocessor : {1, 2, 3})
            for (const int n_kv_head : {1, 2, 4, 8, 16, 32})
                for (const int n_cells : {8192, 32768, 131072}) {
                    const int at_once = gpu.n_multiprocessors * blocks_per_multiprocessor, n_units = n_cells / 64;
                    const int n = best_splits({n_units, n_kv_head, at_once, 1, 512});
                    const int turns = (n * n_kv_head + at_once - 1) / at_once, longest = (n_units + n - 1) / n;
                    // with every place busy all the time, and no place idle that has no unit to do
                    const double ideal = std::max(1.0, static_cast<double>(n_units) * n_kv_head / at_once);
                    const double ratio = turns * longest / ideal;
                    const bool enough = n_units * n_kv_head >= 16 * at_once; // else the rounding to units is seen
                    if (enough) worst = std::max(worst, ratio);
                    if (enough && ratio > 1.15)
                        std::printf("%s, %d blocks each, %d heads, %d cells: %d splits, %.2f\n", gpu.name,
                                    blocks_per_multiprocessor, n_kv_head, n_cells, n, ratio);
                    CHECK(!enough || ratio <= 1.15);
                    CHECK(n >= 1 && n <= n_units);
                }
    std::printf("splits: at most %.2f of the time of a GPU that is always full\n", worst);
    CHECK(best_splits({128, 8, 82, 1, 512}) == 10);  // 80 of 82 places, once: two turns and a bit were 168 blocks
    CHECK(best_splits({0, 8, 82, 1, 512}) == 1);     // nothing to do
    CHECK(best_splits({128, 8, 82, 1, 4}) == 4);     // slots are few
    CHECK(best_splits({2048, 1, 4, 32, 8}) == 32);   // a limit of cells goes first
    CHECK(best_splits({4096, 8, 20, 1, 512}) <= 64); // states are not free
}

void divisions() {
    std::mt19937 random(1);
    for (const unsigned n : {1u, 2u, 3u, 5u, 7u, 31u, 32u, 33u, 97u, 256u, 1000u, 2047u, 2048u, 65537u, 0x7FFFFFFFu})
        for (int i = 0; i < 20000; i++) {
            const unsigned x = i < 2000   ? static_cast<unsigned>(i)
                               : i < 4000 ? 0x7FFFFFFFu - static_cast<unsigned>(i - 2000)
                                          : random() >> 1;
            if (divide(x, make_divisor(n)) != x / n) CHECK(false);
        }
}

} // namespace

int main() {
    splits();
    divisions();
    std::printf("%d failed checks\n", n_failed_checks);
    return n_failed_checks > 0;
}
