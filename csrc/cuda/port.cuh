// What the kernels need of a GPU, one thin named function each; no inline assembly anywhere else.
//
// Three compilers read the kernels: NVRTC, nvcc, and g++ against the host emulation (emulate/device.h), which gives
// the same names other bodies. So the kernels touch shared and global memory through these functions only, and use
// no header of CUDA or of the C++ library.
#pragma once
#include "sites.h"

#if defined(PA_EMULATE)
#include "../emulate/device.h"
#else

#define PA_DEVICE __device__ __forceinline__
#define PA_KERNEL __device__ __forceinline__
#define PA_ARCH (__CUDA_ARCH__ / 10)

namespace paged_attn::gpu {

PA_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
PA_DEVICE int block_x() { return static_cast<int>(blockIdx.x); }
PA_DEVICE int block_y() { return static_cast<int>(blockIdx.y); }
PA_DEVICE int block_z() { return static_cast<int>(blockIdx.z); }

PA_DEVICE char *shared_memory() {
    extern __shared__ __align__(16) char bytes[];
    return bytes;
}

PA_DEVICE void sync_block(At) { __syncthreads(); }
PA_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

template <class T> PA_DEVICE T load_shared(const T *p) { return *p; }
template <class T> PA_DEVICE void store_shared(T *p, T x) { *p = x; }
template <class T> PA_DEVICE T load_global(const T *p) { return *p; }
template <class T> PA_DEVICE void store_global(T *p, T x) { *p = x; }
// K/V rows: read once, by one thread, never written while a kernel runs
PA_DEVICE uint4 load_rows(const uint4 *p) { return __ldg(p); }
PA_DEVICE unsigned load_rows(const unsigned *p) { return __ldg(p); }
PA_DEVICE unsigned short load_rows(const unsigned short *p) { return __ldg(p); }
PA_DEVICE const char *load_rows(const char *const *p) { // an address from a page table
    return reinterpret_cast<const char *>(__ldg(reinterpret_cast<const unsigned long long *>(p)));
}

// ---- asynchronous copies from global to shared memory, sm_80 and later
// SIZE bytes (4 or 16) land by the time wait_async says so; where `valid` is false zeros land and nothing is read.
template <int SIZE> PA_DEVICE void copy_async(void *shared, const void *global, bool valid) {
#if __CUDA_ARCH__ >= 800
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    const int bytes = valid ? SIZE : 0;
    if constexpr (SIZE == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
#endif
}
PA_DEVICE void commit_async() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// All but the newest PENDING groups of this thread have landed, for this thread to see.
template <int PENDING> PA_DEVICE void wait_async(At) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// ---- numbers
PA_DEVICE float as_float(unsigned x) { return __uint_as_float(x); }
PA_DEVICE unsigned as_bits(float x) { return __float_as_uint(x); }
PA_DEVICE float exp2_fast(float x) { // 2 ulp; exp2_fast(-inf) = 0
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
PA_DEVICE float f16_to_f32(unsigned short h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
PA_DEVICE unsigned short f32_to_f16(float f) { // to nearest, ties to even
    unsigned short h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
// a in the lower half, b in the upper; to nearest, ties to even
template <bool BF16> PA_DEVICE unsigned pack_pair(float a, float b) {
#if __CUDA_ARCH__ >= 800
    unsigned pair;
    if constexpr (BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    return pair;
#else
    static_assert(!BF16, "bf16 tensor cores come with sm_80");
    return f32_to_f16(a) | static_cast<unsigned>(f32_to_f16(b)) << 16;
#endif
}
PA_DEVICE unsigned multiply_high(unsigned a, unsigned b) { return __umulhi(a, b); }

// ---- tensor cores, sm_75 and later. A warp's 32 lanes call these together; g = lane / 4, t = lane % 4.
// Four 8x8 matrices of 16-bit values. Lane i gives the address of row i % 8 of matrix i / 8 (16 bytes, aligned);
// r[j] of lane 4g+t holds values 2t, 2t+1 of row g of matrix j (transposed: rows 2t, 2t+1 of column g).
template <bool TRANSPOSED> PA_DEVICE void load_matrices(unsigned (&r)[4], const void *row) {
#if __CUDA_ARCH__ >= 750
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at)
                     : "memory");
#endif
}
// c (16x8, f32) += a (16x16) b (16x8). c[0..1]: row g, columns 2t, 2t+1; c[2..3]: row g+8.
// a[0]: row g, values 2t, 2t+1; a[1]: row g+8; a[2], a[3]: the same, values +8.
// b0: column g, values 2t, 2t+1; b1: the same, values +8.
template <bool BF16> PA_DEVICE void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    if constexpr (BF16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif __CUDA_ARCH__ >= 750
    static_assert(!BF16, "bf16 tensor cores come with sm_80");
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

} // namespace paged_attn::gpu

#endif
