// What this machine gives without attention: multiply-adds in registers, bytes read, bytes copied. Called by ctypes.
//
// Every function starts `threads` threads, lets them begin together and answers a rate by the time until the last has
// ended, the best of `repeats`; 0 where the instruction set is not there.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define PAB_X86 1
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define PAB_API extern "C" __attribute__((visibility("default")))

namespace {

using Clock = std::chrono::steady_clock;

double best_seconds(int threads, int repeats, const std::function<void(int)> &work) {
    double best = 0;
    for (int repeat = 0; repeat < repeats; repeat++) {
        std::atomic<int> ready{0};
        std::atomic<bool> go{false};
        std::vector<Clock::time_point> ends(static_cast<size_t>(threads));
        std::vector<std::thread> team;
        for (int index = 0; index < threads; index++)
            team.emplace_back([&, index] {
                ready++;
                while (!go) std::this_thread::yield();
                work(index);
                ends[static_cast<size_t>(index)] = Clock::now();
            });
        while (ready < threads) std::this_thread::yield();
        const Clock::time_point start = Clock::now();
        go = true;
        for (std::thread &thread : team) thread.join();
        const double seconds = std::chrono::duration<double>(*std::max_element(ends.begin(), ends.end()) - start).count();
        if (repeat == 0 || seconds < best) best = seconds;
    }
    return best;
}

// ---- multiply-adds: 12 independent chains, twice what latency x ports asks for. Zeros: no denormal, no overflow. ----

constexpr long kRounds = 1000000;
constexpr int kChains = 12;

#define PAB_CHAINS(OP) OP(0) OP(1) OP(2) OP(3) OP(4) OP(5) OP(6) OP(7) OP(8) OP(9) OP(10) OP(11)

#if defined(PAB_X86)
__attribute__((target("avx512f"))) void fma_avx512() {
    __m512 a[kChains], x = _mm512_setzero_ps();
    for (__m512 &chain : a) chain = x;
    for (long round = 0; round < kRounds; round++) {
#define PAB_OP(i) asm volatile("vfmadd231ps %1, %1, %0" : "+v"(a[i]) : "v"(x));
        PAB_CHAINS(PAB_OP)
#undef PAB_OP
    }
}

__attribute__((target("avx2,fma"))) void fma_avx2() {
    __m256 a[kChains], x = _mm256_setzero_ps();
    for (__m256 &chain : a) chain = x;
    for (long round = 0; round < kRounds; round++) {
#define PAB_OP(i) asm volatile("vfmadd231ps %1, %1, %0" : "+x"(a[i]) : "x"(x));
        PAB_CHAINS(PAB_OP)
#undef PAB_OP
    }
}
#elif defined(__aarch64__)
void fma_neon() {
    float32x4_t a[kChains], x = vdupq_n_f32(0);
    for (float32x4_t &chain : a) chain = x;
    for (long round = 0; round < kRounds; round++) {
#define PAB_OP(i) asm volatile("fmla %0.4s, %1.4s, %1.4s" : "+w"(a[i]) : "w"(x));
        PAB_CHAINS(PAB_OP)
#undef PAB_OP
    }
}
#endif

// The kernel and its lanes for an instruction set by name; null where this machine has it not.
void (*fma_kernel(const std::string &isa, int *lanes))() {
#if defined(PAB_X86)
    if (isa == "avx512" && __builtin_cpu_supports("avx512f")) return *lanes = 16, fma_avx512;
    if (isa == "avx2" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return *lanes = 8, fma_avx2;
#elif defined(__aarch64__)
    if (isa == "neon") return *lanes = 4, fma_neon;
#endif
    return *lanes = 0, nullptr;
}

// ---- reading: every 64-byte line once. `ahead` is the distance of a software prefetch, 0 for none. ----

using Reader = uint64_t (*)(const char *, size_t bytes, size_t ahead);

#if defined(PAB_X86)
__attribute__((target("avx512f"))) uint64_t read_avx512(const char *at, size_t bytes, size_t ahead) {
    __m512i sum[4] = {};
    for (const char *end = at + bytes; at < end; at += 256) {
        for (size_t line = 0; ahead != 0 && line < 256; line += 64) _mm_prefetch(at + ahead + line, _MM_HINT_T0);
        for (size_t i = 0; i < 4; i++) sum[i] = _mm512_add_epi64(sum[i], _mm512_loadu_si512(at + 64 * i));
    }
    const __m512i all = _mm512_add_epi64(_mm512_add_epi64(sum[0], sum[1]), _mm512_add_epi64(sum[2], sum[3]));
    uint64_t lanes[8];
    std::memcpy(lanes, &all, sizeof lanes);
    return std::accumulate(lanes, lanes + 8, uint64_t{0});
}
#endif

uint64_t read_plain(const char *at, size_t bytes, size_t ahead) {
    uint64_t sum[32] = {};
    for (const char *end = at + bytes; at < end; at += sizeof sum) {
        for (size_t line = 0; ahead != 0 && line < sizeof sum; line += 64) __builtin_prefetch(at + ahead + line);
        uint64_t words[32];
        std::memcpy(words, at, sizeof words);
        for (size_t i = 0; i < 32; i++) sum[i] += words[i];
    }
    return std::accumulate(sum, sum + 32, uint64_t{0});
}

#if defined(PAB_X86)
__attribute__((target("avx2"))) uint64_t read_avx2(const char *at, size_t bytes, size_t ahead) {
    __m256i sum[8] = {};
    for (const char *end = at + bytes; at < end; at += 256) {
        for (size_t line = 0; ahead != 0 && line < 256; line += 64) _mm_prefetch(at + ahead + line, _MM_HINT_T0);
        for (size_t i = 0; i < 8; i++) {
            const auto *word = reinterpret_cast<const __m256i *>(at + 32 * i);
            sum[i] = _mm256_add_epi64(sum[i], _mm256_loadu_si256(word));
        }
    }
    for (size_t i = 1; i < 8; i++) sum[0] = _mm256_add_epi64(sum[0], sum[i]);
    uint64_t lanes[4];
    std::memcpy(lanes, &sum[0], sizeof lanes);
    return std::accumulate(lanes, lanes + 4, uint64_t{0});
}
#endif

std::vector<Reader> readers() {
    std::vector<Reader> known{read_plain};
#if defined(PAB_X86)
    if (__builtin_cpu_supports("avx2")) known.push_back(read_avx2);
    if (__builtin_cpu_supports("avx512f")) known.push_back(read_avx512);
#endif
    return known;
}

std::atomic<uint64_t> g_sink{0}; // what was read must be used, or it is not read

// A thread's share of `bytes`: whole pieces of 4 KiB, in order.
size_t share_begin(size_t bytes, int threads, int index) {
    constexpr size_t piece = 4096;
    return bytes / piece * static_cast<size_t>(index) / static_cast<size_t>(threads) * piece;
}

} // namespace

// f32 operations per second of `threads` threads together; a multiply-add is two.
PAB_API double pab_fma_flops(const char *isa, int threads, int repeats) {
    int lanes = 0;
    void (*const kernel)() = fma_kernel(isa, &lanes);
    if (kernel == nullptr || threads < 1 || repeats < 1) return 0;
    const double seconds = best_seconds(threads, repeats, [&](int) { kernel(); });
    return 2.0 * lanes * kChains * kRounds * threads / seconds;
}

// Bytes per second read from data[0 .. bytes), which should be far larger than the last-level cache: the best of the
// ways to read it, with and without a prefetch.
PAB_API double pab_read_rate(const void *data, size_t bytes, int threads, int repeats) {
    if (threads < 1 || repeats < 1) return 0;
    const char *const begin = static_cast<const char *>(data);
    const size_t used = share_begin(bytes, threads, threads);
    double best = 0;
    for (const Reader reader : readers())
        for (const size_t ahead : {0, 1024, 4096}) {
            const double seconds = best_seconds(threads, repeats, [&](int index) {
                const size_t from = share_begin(bytes, threads, index), to = share_begin(bytes, threads, index + 1);
                g_sink += reader(begin + from, to - from, ahead);
            });
            best = std::max(best, static_cast<double>(used) / seconds);
        }
    return best;
}

// Bytes per second copied from source to target; each is read once and written once, counted once.
PAB_API double pab_copy_rate(void *target, const void *source, size_t bytes, int threads, int repeats) {
    if (threads < 1 || repeats < 1) return 0;
    const size_t used = share_begin(bytes, threads, threads);
    const double seconds = best_seconds(threads, repeats, [&](int index) {
        const size_t from = share_begin(bytes, threads, index), to = share_begin(bytes, threads, index + 1);
        std::memcpy(static_cast<char *>(target) + from, static_cast<const char *>(source) + from, to - from);
    });
    return static_cast<double>(used) / seconds;
}
