// Two builds of libpaged_attn.so beside each other: new time / old time.
//   g++ -O2 -std=c++17 -Icsrc/include csrc/bench/pairs.cpp -o build/pairs -ldl
//   build/pairs OLD.so NEW.so [isa] [rounds] [part of a name]
// OLD is the baseline: libpaged_attn.so of another commit. One thread each, in turns; processor time of that thread, so that
// neighbours on the machine count little. Both run once before they are timed.
#include "paged_attn/paged_attn.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <vector>

namespace {

struct Case {
    const char *name;
    int n_head, n_kv_head, d;
    pa_dtype type;
    int n_q, n_cells;
    int slots = 1; // sequences, one after another in the cells, each with one query; positions are given where OLD takes them
};
constexpr Case kCases[] = {
    {"prefill 512 at 2K, 16/8 d128 f16", 16, 8, 128, PA_F16, 512, 2048},
    {"prefill 512 at 8K, 16/8 d128 f16", 16, 8, 128, PA_F16, 512, 8192},
    {"prefill 512 at 8K, 40/8 d128 f16", 40, 8, 128, PA_F16, 512, 8192},
    {"prefill 512 at 8K, 40/8 d128 q8_0", 40, 8, 128, PA_Q8_0, 512, 8192},
    {"prefill 512 at 2K, 16/8 d64 f16", 16, 8, 64, PA_F16, 512, 2048},
    {"prefill 512 at 8K, 16/8 d64 q8_0", 16, 8, 64, PA_Q8_0, 512, 8192},
    {"decode at 8K, 16/8 d128 f16", 16, 8, 128, PA_F16, 1, 8192},
    {"decode at 8K, 40/8 d128 f16", 40, 8, 128, PA_F16, 1, 8192},
    {"decode at 8K, 40/8 d64 f16", 40, 8, 64, PA_F16, 1, 8192},
    {"decode at 8K, 16/8 d128 q8_0", 16, 8, 128, PA_Q8_0, 1, 8192},
    {"decode at 64K, 16/8 d128 f16", 16, 8, 128, PA_F16, 1, 65536},
    {"decode at 64K, 40/8 d128 f16", 40, 8, 128, PA_F16, 1, 65536},
    {"decode at 64K, 16/8 d128 q8_0", 16, 8, 128, PA_Q8_0, 1, 65536},
    {"decode at 64K, 40/8 d128 q8_0", 40, 8, 128, PA_Q8_0, 1, 65536},
    {"decode at 64K, 16/8 d64 q8_0", 16, 8, 64, PA_Q8_0, 1, 65536},
    {"8 slots at 2K, 16/8 d128 f16", 16, 8, 128, PA_F16, 8, 8 * 2048, 8},
    {"16 slots at 2K, 16/8 d128 f16", 16, 8, 128, PA_F16, 16, 16 * 2048, 16},
    {"32 slots at 2K, 16/8 d128 f16", 16, 8, 128, PA_F16, 32, 32 * 2048, 32},
};

struct Library {
    decltype(&pa_cpu_plan_create) create;
    decltype(&pa_cpu_run) run;
    decltype(&pa_cpu_plan_destroy) destroy;

    explicit Library(const char *path) {
        void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) {
            std::fprintf(stderr, "%s\n", dlerror());
            std::exit(2);
        }
        create = reinterpret_cast<decltype(create)>(dlsym(handle, "pa_cpu_plan_create"));
        run = reinterpret_cast<decltype(run)>(dlsym(handle, "pa_cpu_run"));
        destroy = reinterpret_cast<decltype(destroy)>(dlsym(handle, "pa_cpu_plan_destroy"));
    }
};

double seconds() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

// Rows on large pages, as a cache has them; every f16 and every scale is of ordinary size.
uint8_t *filled(size_t bytes, pa_dtype type, std::mt19937_64 &random) {
    bytes = (bytes + (size_t{2} << 20)) & ~((size_t{2} << 20) - 1);
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::exit(2);
    madvise(memory, bytes, MADV_HUGEPAGE);
    auto *at = static_cast<uint8_t *>(memory);
    const size_t block = type == PA_Q8_0 ? 34 : 2;
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        const uint64_t bits = random();
        std::memcpy(at + i, &bits, 8);
    }
    for (size_t i = 0; i + 2 <= bytes; i += block) at[i + 1] = uint8_t(type == PA_Q8_0 ? 0x24 : (at[i + 1] & 0x83) | 0x38);
    return at;
}

void compare(const Case &c, const Library *libraries, const char *isa, int rounds) {
    std::mt19937_64 random(7);
    std::normal_distribution<float> normal;
    const int64_t row = c.type == PA_Q8_0 ? c.d / 32 * 34 : c.d * 2;
    const size_t bytes = size_t(c.n_cells) * size_t(c.n_kv_head) * size_t(row);
    const void *k = filled(bytes, c.type, random), *v = filled(bytes, c.type, random);
    std::vector<float> q(size_t(c.n_q * c.n_head * c.d)), out(q.size());
    for (float &value : q) value = normal(random) * 0.3f;
    std::vector<uint16_t> mask(size_t(c.n_q) * size_t(c.n_cells));
    const int length = c.n_cells / c.slots; // of a sequence
    for (int i = 0; i < c.n_q; i++)
        for (int cell = 0; cell < c.n_cells; cell++) {
            const bool seen = c.slots > 1 ? cell / length == i : cell <= c.n_cells - c.n_q + i;
            mask[size_t(i) * size_t(c.n_cells) + size_t(cell)] = seen ? 0 : 0xFC00;
        }
    std::vector<int32_t> positions;
    for (int cell = 0; cell < c.n_cells; cell++) positions.push_back(cell % length);
    pa_shape shape{c.n_head, c.n_kv_head, c.d, c.d, c.n_q, c.n_cells, c.type, c.type, 1.0f / std::sqrt(float(c.d)), 0.0f};
    pa_args args{};
    args.n_q = c.n_q;
    args.n_cells = c.n_cells;
    args.q = q.data();
    args.q_head_stride = c.d * 4;
    args.q_stride = args.q_head_stride * c.n_head;
    args.k = {&k, 1, c.n_cells, row * c.n_kv_head, row};
    args.v = {&v, 1, c.n_cells, row * c.n_kv_head, row};
    args.mask.dense = mask.data();
    args.mask.dense_stride = 2 * c.n_cells;
    args.out = out.data();
    pa_args of_library[2] = {args, args};
    pa_cpu_plan *plans[2];
    std::vector<double> times[2];
    for (int i = 0; i < 2; i++) {
        if (libraries[i].create(&shape, 1, isa, &plans[i]) != PA_OK) std::exit(2);
        if (c.slots > 1) of_library[i].mask.cell_pos = positions.data();
        if (libraries[i].run(plans[i], &of_library[i]) == PA_OK) continue;
        of_library[i] = args; // before version 2, none beside a dense mask
        if (libraries[i].run(plans[i], &args) != PA_OK) std::exit(2);
    }
    const int runs = c.n_q == 1 && c.n_cells <= 8192 ? 5 : 1;
    for (int round = 0; round < rounds; round++)
        for (int turn = 0; turn < 2; turn++) {
            const int i = (turn + round) % 2;
            libraries[i].run(plans[i], &of_library[i]); // not counted: the caches are now this one's
            const double start = seconds();
            for (int r = 0; r < runs; r++) libraries[i].run(plans[i], &of_library[i]);
            times[i].push_back((seconds() - start) / runs);
        }
    for (auto &each : times) std::sort(each.begin(), each.end());
    std::printf("%-36s %8.2f ms  best x%.3f  median x%.3f\n", c.name, times[0][0] * 1e3, times[1][0] / times[0][0],
                times[1][times[1].size() / 2] / times[0][times[0].size() / 2]);
    for (int i = 0; i < 2; i++) libraries[i].destroy(plans[i]);
    const size_t mapped = (bytes + (size_t{2} << 20)) & ~((size_t{2} << 20) - 1);
    munmap(const_cast<void *>(k), mapped);
    munmap(const_cast<void *>(v), mapped);
}

} // namespace

int main(int argc, char **argv) {
    if (argc < 3) {
        std::fprintf(stderr, "pairs OLD.so NEW.so [isa] [rounds] [part of a name]\n");
        return 2;
    }
    const Library libraries[2] = {Library(argv[1]), Library(argv[2])};
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    for (const Case &c : kCases)
        if (argc < 6 || std::strstr(c.name, argv[5])) compare(c, libraries, argc > 3 ? argv[3] : "auto", argc > 4 ? std::atoi(argv[4]) : 7);
}
