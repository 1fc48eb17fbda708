// The delivery ring on a simulated GPU: order of the calls, random orders of execution with poison, mistakes made on
// purpose, overlap by the clock, cancellation, teardown, errors of the driver; and the CPU's share.
#include "check.h"
#include "cuda/host/device.h"
#include "simulated_gpu.h"

#include <cmath>

using namespace paged_attn::gpu;
using namespace paged_attn::gpu::test;

namespace {

constexpr size_t kSlotBytes = 64;

struct Fixture {
    SimulatedGpu gpu;
    pa_cuda_device *device = nullptr;
    pa_cuda_ring *ring = nullptr;
    CuStream compute;
    std::vector<std::vector<char>> host;
    std::vector<pa_piece> pieces;

    Fixture(int n_slots, int n_pieces, unsigned seed = 1, Wrong wrong = Wrong::nothing)
        : gpu(seed, wrong), compute(gpu.stream("compute")) {
        CHECK(open_device(gpu.driver(), 0, &device) == PA_OK);
        CHECK(pa_cuda_ring_create(device, n_slots, kSlotBytes, &ring) == PA_OK);
        for (int i = 0; i < n_pieces; i++)
            host.emplace_back(kSlotBytes - static_cast<size_t>(i % 3) * 16, static_cast<char>(i + 1));
        for (const auto &h : host) pieces.push_back({h.data(), h.size()});
    }
    ~Fixture() {
        pa_cuda_ring_destroy(ring);
        pa_cuda_close(device);
        CHECK(gpu.n_events == 0 && gpu.n_streams == 0 && gpu.n_allocations == 0 && gpu.n_contexts == 0 &&
              gpu.n_pushed == 0);
    }
    void use(int piece) {
        CHECK(pa_cuda_ring_acquire(ring, piece, compute) == PA_OK);
        gpu.read_kernel(compute, pa_cuda_ring_slot(ring, piece), host[static_cast<size_t>(piece)].data(),
                        host[static_cast<size_t>(piece)].size());
        CHECK(pa_cuda_ring_release(ring, piece, compute) == PA_OK);
    }
    void token() {
        CHECK(pa_cuda_ring_begin(ring, pieces.data(), static_cast<int>(pieces.size())) == PA_OK);
        for (int i = 0; i < static_cast<int>(pieces.size()); i++) use(i);
        CHECK(pa_cuda_ring_end(ring) == PA_OK);
    }
};

// Appendix A, written out for a first token of 5 pieces through 3 slots.
const std::vector<std::string> kOrder = {
    "copy copies",
    "copy records filled0",
    "copy copies",
    "copy records filled1",
    "copy copies",
    "copy records filled2",
    "compute waits filled0#1",
    "compute runs",
    "compute records drained0",
    "copy waits drained0#1",
    "copy copies",
    "copy records filled0",
    "compute waits filled1#1",
    "compute runs",
    "compute records drained1",
    "copy waits drained1#1",
    "copy copies",
    "copy records filled1",
    "compute waits filled2#1",
    "compute runs",
    "compute records drained2",
    "compute waits filled0#2",
    "compute runs",
    "compute records drained0",
    "compute waits filled1#2",
    "compute runs",
    "compute records drained1",
};

void order() {
    Fixture f(3, 5);
    f.token();
    CHECK(f.gpu.calls == kOrder);
    f.gpu.calls.clear();
    f.token(); // the next token waits for the last readers of each slot
    CHECK(f.gpu.calls.size() == kOrder.size() + 3 && f.gpu.calls[0] == "copy waits drained0#2" &&
          f.gpu.calls[3] == "copy waits drained1#2" && f.gpu.calls[6] == "copy waits drained2#1");
}

// Two tokens in a random order of execution; how often a kernel saw what it must not see.
size_t violations(int n_slots, int n_pieces, unsigned seed, Wrong wrong) {
    Fixture f(n_slots, n_pieces, seed, wrong);
    f.token();
    f.token();
    f.gpu.finish();
    return f.gpu.violations.size();
}

void random_orders() {
    for (unsigned seed = 1; seed <= 300; seed++)
        CHECK(violations(3 + static_cast<int>(seed % 3), static_cast<int>(seed % 17), seed, Wrong::nothing) == 0);
}

void mistakes() {
    const std::pair<Wrong, const char *> all[] = {
        {Wrong::copy_does_not_wait, "copies that do not wait for readers"},
        {Wrong::compute_does_not_wait, "kernels that do not wait for copies"},
        {Wrong::filled_before_copy, "filled recorded before the copy"},
        {Wrong::filled_after_next_copy, "filled recorded after the next copy"},
        {Wrong::drained_before_kernel, "drained recorded before the kernel"},
    };
    for (const auto &[wrong, what] : all) {
        size_t n_seen = 0;
        for (unsigned seed = 1; seed <= 100; seed++) n_seen += violations(3, 8, seed, wrong) > 0;
        Fixture f(3, 5, 1, wrong);
        f.token();
        const bool differs = f.gpu.calls != kOrder;
        std::printf("%s: %s: seen in %zu of 100 orders%s\n", differs ? "caught" : "MISSED", what, n_seen,
                    differs ? ", and in the order of calls" : "");
        CHECK(differs);
        // recorded too late is no race: kernels wait for one copy more than they need, which only costs time
        CHECK(n_seen > 0 || wrong == Wrong::filled_after_next_copy);
    }
}

double over_maximum(double copy_s, double kernel_s) {
    Fixture f(3, 96); // 48 layers, two pieces each
    f.gpu.copy_s_per_byte = copy_s / static_cast<double>(kSlotBytes);
    f.gpu.kernel_s = kernel_s;
    f.token();
    f.gpu.finish();
    return f.gpu.seconds() / std::max(f.gpu.copy_seconds(), f.gpu.kernel_seconds());
}

void overlap() {
    for (const double kernel_s : {0.1, 0.5, 1.0, 2.0, 10.0}) {
        const double ratio = over_maximum(1.0, kernel_s);
        std::printf("kernel / copy %.1f: token / max(copies, kernels) = %.3f (simulated)\n", kernel_s, ratio);
        CHECK(ratio <= 1.10);
    }
}

void cancellation() {
    for (int n_used = 0; n_used <= 7; n_used++)
        for (unsigned seed = 1; seed <= 20; seed++) {
            Fixture f(3, 8, seed);
            CHECK(pa_cuda_ring_begin(f.ring, f.pieces.data(), 8) == PA_OK);
            for (int i = 0; i < n_used; i++) f.use(i);
            CHECK(pa_cuda_ring_acquire(f.ring, n_used, f.compute) == PA_OK); // a reader that never releases
            f.gpu.read_kernel(f.compute, pa_cuda_ring_slot(f.ring, n_used), f.host[static_cast<size_t>(n_used)].data(),
                              32);
            CHECK_SAYS(pa_cuda_ring_end(f.ring), PA_CANCELLED, "pieces left");
            for (size_t i = static_cast<size_t>(n_used) + 1; i < 8; i++) // the host's memory is the caller's again
                std::fill(f.host[i].begin(), f.host[i].end(), static_cast<char>(99));
            f.token();
            f.gpu.finish();
            CHECK(f.gpu.violations.empty());
        }
    Fixture torn_down(3, 8); // destroyed in the middle of a token: the fixture checks that nothing is left
    CHECK(pa_cuda_ring_begin(torn_down.ring, torn_down.pieces.data(), 8) == PA_OK);
    torn_down.use(0);
}

void misuse() {
    Fixture f(3, 8);
    CHECK_SAYS(pa_cuda_ring_acquire(f.ring, 0, f.compute), PA_BAD_ARGUMENT, "without a token");
    const pa_piece large[] = {{f.host[0].data(), kSlotBytes + 1}}, null[] = {{nullptr, 16}};
    CHECK_SAYS(pa_cuda_ring_begin(f.ring, large, 1), PA_BAD_ARGUMENT, "a slot has 64");
    CHECK_SAYS(pa_cuda_ring_begin(f.ring, null, 1), PA_BAD_ARGUMENT, "piece 0");
    CHECK(pa_cuda_ring_begin(f.ring, f.pieces.data(), 8) == PA_OK);
    CHECK_SAYS(pa_cuda_ring_begin(f.ring, f.pieces.data(), 8), PA_BAD_ARGUMENT, "under way");
    CHECK_SAYS(pa_cuda_ring_acquire(f.ring, 1, f.compute), PA_BAD_ARGUMENT, "0 is next");
    CHECK_SAYS(pa_cuda_ring_release(f.ring, 0, f.compute), PA_BAD_ARGUMENT, "not acquired");
    for (int i = 0; i < 3; i++) CHECK(pa_cuda_ring_acquire(f.ring, i, f.compute) == PA_OK);
    CHECK_SAYS(pa_cuda_ring_acquire(f.ring, 3, f.compute), PA_BAD_ARGUMENT, "before 0 was released");
    CHECK_SAYS(pa_cuda_ring_release(f.ring, 0, f.gpu.stream("other")), PA_BAD_ARGUMENT, "another stream");
    pa_cuda_ring *other = nullptr;
    CHECK_SAYS(pa_cuda_ring_create(f.device, 2, 64, &other), PA_BAD_ARGUMENT, "at least 3");
    CHECK_SAYS(pa_cuda_ring_create(f.device, 3, 60, &other), PA_BAD_ARGUMENT, "multiple of 16");
    f.gpu.memory_left = 100;
    CHECK_SAYS(pa_cuda_ring_create(f.device, 3, 64, &other), PA_OUT_OF_MEMORY, "cuMemAlloc_v2");
}

void driver_errors() { // each call that may fail, failing at each of its turns
    for (const char *call : {"cuCtxPushCurrent_v2", "cuMemAlloc_v2", "cuStreamCreate", "cuEventCreate",
                             "cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuStreamWaitEvent"})
        for (int turn = 0; turn < 12; turn++) {
            SimulatedGpu gpu(static_cast<unsigned>(turn) + 1);
            gpu.fail_at = call;
            gpu.fail_after = turn;
            pa_cuda_device *device = nullptr;
            pa_cuda_ring *ring = nullptr;
            CuStream compute = gpu.stream("compute");
            const std::vector<char> host(kSlotBytes, 7);
            const std::vector<pa_piece> pieces(6, pa_piece{host.data(), host.size()});
            CHECK(open_device(gpu.driver(), 0, &device) == PA_OK);
            pa_status status = pa_cuda_ring_create(device, 3, kSlotBytes, &ring);
            if (status == PA_OK) status = pa_cuda_ring_begin(ring, pieces.data(), 6);
            for (int i = 0; i < 6 && status == PA_OK; i++) {
                status = pa_cuda_ring_acquire(ring, i, compute);
                if (status == PA_OK) status = pa_cuda_ring_release(ring, i, compute);
            }
            const bool reached = gpu.fail_at.empty();
            CHECK(status == (reached ? PA_DEVICE_ERROR : PA_OK));
            if (reached) CHECK(std::string(pa_cuda_last_error()).find(call) != std::string::npos);
            pa_cuda_ring_destroy(ring);
            pa_cuda_close(device);
            CHECK(gpu.n_events == 0 && gpu.n_streams == 0 && gpu.n_allocations == 0 && gpu.n_pushed == 0);
        }
}

void failed_begins() { // no token is under way afterwards, no copy either, and the next token is as good as the first
    int n_failed = 0;
    for (const char *call : {"cuCtxPushCurrent_v2", "cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuStreamWaitEvent"})
        for (int turn = 0; turn < 3; turn++)
            for (unsigned seed = 1; seed <= 10; seed++) {
                Fixture f(3, 8, seed);
                f.token();
                f.gpu.fail_at = call;
                f.gpu.fail_after = turn;
                const pa_status status = pa_cuda_ring_begin(f.ring, f.pieces.data(), 8);
                if (!f.gpu.fail_at.empty()) { // not reached: a good begin
                    f.gpu.fail_at.clear();
                    CHECK(status == PA_OK);
                    CHECK_SAYS(pa_cuda_ring_end(f.ring), PA_CANCELLED, "8 of 8 pieces left");
                    continue;
                }
                n_failed++;
                CHECK(status == PA_DEVICE_ERROR && std::string(pa_cuda_last_error()).find(call) == 0);
                CHECK(std::string(call) == "cuCtxPushCurrent_v2" || f.gpu.idle("copy"));
                CHECK_SAYS(pa_cuda_ring_acquire(f.ring, 0, f.compute), PA_BAD_ARGUMENT, "without a token");
                f.token();
                f.gpu.finish();
                CHECK(f.gpu.violations.empty());
            }
    CHECK(n_failed >= 90);
}

void host_memory_after_the_end() {
    for (unsigned seed = 1; seed <= 20; seed++) {
        Fixture f(3, 8, seed); // every fifth seed: the GPU stands still until somebody waits for it
        f.token();
        if (seed % 5 == 0) CHECK(!f.gpu.idle("copy"));
        CHECK(pa_cuda_ring_wait(f.ring) == PA_OK && f.gpu.idle("copy"));
        CHECK(pa_cuda_ring_begin(f.ring, f.pieces.data(), 8) == PA_OK);
        CHECK_SAYS(pa_cuda_ring_wait(f.ring), PA_BAD_ARGUMENT, "under way");
        CHECK_SAYS(pa_cuda_ring_end(f.ring), PA_CANCELLED, "8 of 8 pieces left");
        CHECK(f.gpu.idle("copy"));
    }
    CHECK_SAYS(pa_cuda_ring_wait(nullptr), PA_BAD_ARGUMENT, "no ring");
}

void shares() {
    int x = -1;
    const auto share = [&](double stream, double cpu, double memory, double head_start, int n) {
        const pa_rates rates = {stream, cpu, memory, head_start};
        CHECK(pa_cuda_cpu_share(&rates, n, 1000, &x) == PA_OK);
        return x;
    };
    CHECK(share(1000, 1000, 2000, 0, 100) == 50); // equal rates
    CHECK(share(1000, 3000, 4000, 0, 100) == 75);
    CHECK(share(1000, 9000, 2000, 0, 100) == 50);  // memory holds the CPU back
    CHECK(share(1000, 9000, 1000, 0, 100) == 0);   // copies take all that memory gives
    CHECK(share(1000, 1000, 2000, 100, 100) == 0); // copied before the CPU begins
    CHECK(share(1000, 1000, 2000, 50, 100) == 25);
    CHECK(share(1000, 1000, 2000, 0, 0) == 0);
    CHECK(share(1000, 10, 2000, 0, 1) == 0);
    std::mt19937 random(1);
    const auto uniform = [&](double from, double to) {
        return from + (to - from) * static_cast<double>(random()) / 4294967295.0;
    };
    for (int i = 0; i < 2000; i++) { // no other share ends earlier
        const pa_rates r = {uniform(1e9, 6e10), uniform(1e9, 1e11), uniform(1e10, 1e11), uniform(0, 0.05)};
        const int n = static_cast<int>(random() % 200);
        const double bytes = 1e6, rate = std::fmin(r.cpu_bytes_per_s, r.memory_bytes_per_s - r.stream_bytes_per_s);
        CHECK(pa_cuda_cpu_share(&r, n, 1000000, &x) == PA_OK && x >= 0 && x <= n);
        const auto end = [&](int share_) {
            const double copied = (n - share_) * bytes / r.stream_bytes_per_s;
            return share_ == 0 ? copied
                   : rate <= 0 ? INFINITY
                               : std::fmax(copied, r.head_start_s + share_ * bytes / rate);
        };
        double best = INFINITY;
        for (int other = 0; other <= n; other++) best = std::fmin(best, end(other));
        CHECK(end(x) <= best * (1 + 1e-12));
    }
    const pa_rates bad = {0, 1, 1, 0};
    CHECK_SAYS(pa_cuda_cpu_share(&bad, 1, 1, &x), PA_BAD_ARGUMENT, "positive");
}

} // namespace

int main() {
    order();
    random_orders();
    mistakes();
    overlap();
    cancellation();
    misuse();
    driver_errors();
    failed_begins();
    host_memory_after_the_end();
    shares();
    std::printf("%d failed checks\n", n_failed_checks);
    return n_failed_checks > 0;
}
