// Reads a buffer once: what this GPU's memory delivers to a kernel (ollama_tiering/kernels/gpu_bench.py compares with it).
extern "C" __global__ void __launch_bounds__(256) pa_read(const uint4 *from, unsigned long long n, unsigned *out) {
    const unsigned long long step = gridDim.x * 256ull;
    unsigned long long i = blockIdx.x * 256ull + threadIdx.x;
    unsigned seen = 0;
    for (; i + 3 * step < n; i += 4 * step) { // four reads under way
        const uint4 a = __ldg(from + i), b = __ldg(from + i + step), c = __ldg(from + i + 2 * step),
                    d = __ldg(from + i + 3 * step);
        seen |= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < n; i += step) {
        const uint4 a = __ldg(from + i);
        seen |= a.x ^ a.y ^ a.z ^ a.w;
    }
    if (seen == 0x9E3779B9u) *out = seen; // the compiler does not know that the buffer holds zeros
}
