// Where the bytes of an extent lie, and how a block of 64 of them gets into registers.
//
// One rule: no byte outside the extent is ever read, whatever its alignment. The host packs Extent as it
// stands here (gpu/device.py).
#pragma once

#ifndef CKPTFS_ON_CPU
#include <cuda/std/cstdint>
using namespace cuda::std;
#endif

struct Extent {
    uint64_t address;
    uint64_t length;
    uint64_t first_segment;  // in this launch; a segment belongs to one extent
};

// A leaf is what one thread hashes, a segment what one block of threads does. BLAKE3 fixes the leaf.
constexpr uint32_t LEAF_BYTES = 1024;
constexpr uint32_t SEGMENT_LEAVES = 128;
constexpr uint32_t SEGMENT_BYTES = LEAF_BYTES * SEGMENT_LEAVES;
constexpr uint32_t BLOCK_BYTES = 64;
// The kernels that join segments have blocks of this many threads.
constexpr uint32_t JOIN_THREADS = 32;

// An empty extent has one segment too.
__device__ __forceinline__ uint64_t segments_of(const Extent &extent) {
    const uint64_t whole = (extent.length + SEGMENT_BYTES - 1) / SEGMENT_BYTES;
    return whole == 0 ? 1 : whole;
}

// Tells the compiler that it is no shared or local memory, which saves it the general kind of load.
template <typename T>
__device__ __forceinline__ const T *global(uint64_t address) {
    return static_cast<const T *>(__cvta_global_to_generic(address));
}

// The 64 bytes from `offset` on as little-endian words; what lies before or behind the extent is zero.
// All threads of a block see one alignment, so that the choice of the path costs no divergence.
__device__ __forceinline__ void load_block(const Extent &extent, int64_t offset, uint32_t (&words)[16]) {
    const int64_t length = static_cast<int64_t>(extent.length);
    const uint64_t at = extent.address + static_cast<uint64_t>(offset);
    const uint32_t skew = at % 4;
    const bool inside = offset >= 0 && offset + BLOCK_BYTES <= length;
    if (inside && at % 16 == 0) {
        const uint4 *from = global<uint4>(at);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 quad = from[i];
            words[4 * i] = quad.x;
            words[4 * i + 1] = quad.y;
            words[4 * i + 2] = quad.z;
            words[4 * i + 3] = quad.w;
        }
    } else if (inside && skew == 0) {
        const uint32_t *from = global<uint32_t>(at);
#pragma unroll
        for (int i = 0; i < 16; i++) words[i] = from[i];
    } else if (offset >= skew && offset - skew + BLOCK_BYTES + 4 <= length) {
        // The 17 aligned words around the block are within the extent.
        const uint32_t *from = global<uint32_t>(at - skew);
        uint32_t low = from[0];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const uint32_t high = from[i + 1];
            words[i] = __funnelshift_r(low, high, 8 * skew);
            low = high;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            words[i] = 0;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int64_t place = offset + 4 * i + k;
                if (place >= 0 && place < length) {
                    const uint32_t byte = *global<uint8_t>(at + 4 * i + k);
                    words[i] |= byte << (8 * k);
                }
            }
        }
    }
}
