// The CPU's share of the cold pieces, from measured rates.
//
// Copies run from the start; the CPU begins `head_start` later, when its query is there. Both read host memory, so
// the CPU gets what the copies leave: rate = min(cpu, memory - stream). Both end together when
//     (n - x) bytes / stream = head_start + x bytes / rate.
#include "device.h"

#include <cmath>

using namespace paged_attn::gpu;

pa_status pa_cuda_cpu_share(const pa_rates *rates, int32_t n_pieces, size_t piece_bytes, int32_t *cpu_pieces) {
    if (!rates || !cpu_pieces) return fail(PA_BAD_ARGUMENT, "null where rates or the share go");
    *cpu_pieces = 0;
    const auto positive = [](double x) { return std::isfinite(x) && x > 0.0; };
    if (!positive(rates->stream_bytes_per_s) || !positive(rates->cpu_bytes_per_s) ||
        !positive(rates->memory_bytes_per_s))
        return fail(PA_BAD_ARGUMENT, "rates are positive numbers of bytes per second");
    if (!std::isfinite(rates->head_start_s) || rates->head_start_s < 0.0 || n_pieces < 0)
        return fail(PA_BAD_ARGUMENT, "a head start of %g s over %d pieces", rates->head_start_s, n_pieces);
    const double stream = rates->stream_bytes_per_s;
    const double rate = std::fmin(rates->cpu_bytes_per_s, rates->memory_bytes_per_s - stream);
    const double bytes = static_cast<double>(piece_bytes), total = bytes * n_pieces;
    const double left = total - stream * rates->head_start_s; // not copied when the CPU begins
    if (rate <= 0.0 || left <= 0.0) return PA_OK;
    const auto end = [&](int x) {
        const double copied = (n_pieces - x) * bytes / stream;
        return x == 0 ? copied : std::fmax(copied, rates->head_start_s + x * bytes / rate);
    };
    const int below = static_cast<int>(left / (stream + rate) * rate / bytes); // of whole pieces
    *cpu_pieces = below < n_pieces && end(below + 1) < end(below) ? below + 1 : below;
    return PA_OK;
}
