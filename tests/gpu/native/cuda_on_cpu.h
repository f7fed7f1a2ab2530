// CUDA C++ as a C++ compiler may read it; comes before the kernels' own text (g++ -include).
#pragma once
#define CKPTFS_ON_CPU

#include <cstddef>
#include <cstdint>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(threads)
// In a section of their own, so that they can be poisoned between blocks.
#define __shared__ static __attribute__((section("shared_memory")))

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct Index {
    uint32_t x, y, z;
};

// Set by the scheduler for the fiber that runs.
extern Index threadIdx, blockIdx, gridDim;

void __syncthreads();
uint32_t atomicAdd(uint32_t *at, uint32_t value);

inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t bits) {
    const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
    return static_cast<uint32_t>(both >> (bits % 32));
}

inline void *__cvta_global_to_generic(uint64_t address) {
    return reinterpret_cast<void *>(address);
}
