// CRC-64/NVME of many extents: the remainder of each, which gpu/crc64.py makes a checksum of.
//
// One rule: what leaves the device is the plain remainder of the bytes as a polynomial, from a register of
// zero and with nothing inverted, so that leading zeros change nothing. Therefore leaves and segments are
// counted from the END of an extent: all of them but the first in memory are whole, and joining two needs to
// know only their place, never their length.
//
// Source: the NVM Express specification's 64-bit CRC (reflected polynomial below); tests/gpu compares with awscrt.
// A remainder has its x^0 in bit 63 and its x^63 in bit 0.
#include "load.cuh"

constexpr uint64_t POLYNOMIAL = 0x9a6c9329ac4bc9b5;
constexpr uint64_t ONE = 0x8000000000000000;

__host__ __device__ constexpr uint64_t times_x(uint64_t value) {
    return (value >> 1) ^ ((value & 1) != 0 ? POLYNOMIAL : 0);
}

__host__ __device__ constexpr uint64_t multiply(uint64_t left, uint64_t right) {
    uint64_t product = 0;
    for (int i = 0; i < 64; i++) {
        product ^= (left & ONE) != 0 ? right : 0;
        left <<= 1;
        right = times_x(right);
    }
    return product;
}

struct Tables {
    // step[i][v]: v at bit 4i of the register, after 8 bytes more. A row of 16 fills the 32 banks of
    // shared memory exactly, so that no lookup of a warp waits for another.
    uint64_t step[16][16];
    uint64_t leaves[SEGMENT_LEAVES];  // x^(8 LEAF_BYTES k)
    uint64_t square[64];              // x^(2^k)
};

constexpr Tables make_tables() {
    Tables tables{};
    for (int place = 0; place < 16; place++) {
        for (int nibble = 0; nibble < 16; nibble++) {
            uint64_t value = static_cast<uint64_t>(nibble) << (4 * place);
            for (int i = 0; i < 64; i++) value = times_x(value);
            tables.step[place][nibble] = value;
        }
    }
    tables.square[0] = ONE >> 1;
    for (int k = 1; k < 64; k++) tables.square[k] = multiply(tables.square[k - 1], tables.square[k - 1]);
    tables.leaves[0] = ONE;
    for (uint32_t k = 1; k < SEGMENT_LEAVES; k++)
        tables.leaves[k] = multiply(tables.leaves[k - 1], tables.square[13]);
    return tables;
}

static_assert(8 * LEAF_BYTES == 1u << 13 && 8 * SEGMENT_BYTES == 1u << 20, "the powers of x that join them");

__device__ constexpr Tables TABLES = make_tables();

// The remainder of the leaf that ends at `end` (LEAF_BYTES, or what there is before it; none if end <= 0).
__device__ __forceinline__ uint64_t leaf_remainder(const Extent &extent, int64_t end, const uint64_t (&step)[16][16]) {
    uint64_t remainder = 0;
    for (int64_t offset = end - LEAF_BYTES; offset < end; offset += BLOCK_BYTES) {
        if (offset + BLOCK_BYTES <= 0) continue;
        uint32_t words[16];
        load_block(extent, offset, words);
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
            const uint32_t low = words[i] ^ static_cast<uint32_t>(remainder);
            const uint32_t high = words[i + 1] ^ static_cast<uint32_t>(remainder >> 32);
            remainder = 0;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                remainder ^= step[k][(low >> (4 * k)) & 15];
                remainder ^= step[k + 8][(high >> (4 * k)) & 15];
            }
        }
    }
    return remainder;
}

// Grid: one block of SEGMENT_LEAVES threads for each segment of the launch.
// extent_of: u32 for each segment, ascending. remainders: one for each segment, the last of an extent first (out).
extern "C" __global__ void __launch_bounds__(SEGMENT_LEAVES)
    crc64_segments(const Extent *extents, const uint32_t *extent_of, uint64_t *remainders) {
    __shared__ uint64_t step[16][16];
    __shared__ uint64_t sums[SEGMENT_LEAVES];
    const uint32_t segment = blockIdx.x;
    const uint32_t thread = threadIdx.x;
    const Extent extent = extents[extent_of[segment]];
    for (uint32_t i = thread; i < 256; i += SEGMENT_LEAVES) step[i / 16][i % 16] = TABLES.step[i / 16][i % 16];
    __syncthreads();

    const uint64_t leaf = (segment - extent.first_segment) * SEGMENT_LEAVES + thread;
    const int64_t end = static_cast<int64_t>(extent.length) - static_cast<int64_t>(leaf * LEAF_BYTES);
    sums[thread] = end > 0 ? multiply(leaf_remainder(extent, end, step), TABLES.leaves[thread]) : 0;
    for (uint32_t span = SEGMENT_LEAVES / 2; span > 0; span /= 2) {
        __syncthreads();
        if (thread < span) sums[thread] ^= sums[thread + span];
    }
    if (thread == 0) remainders[segment] = sums[0];
}

// Grid: one block of JOIN_THREADS threads for each extent. results: a remainder for each extent (out).
extern "C" __global__ void __launch_bounds__(JOIN_THREADS)
    crc64_extents(const Extent *extents, uint64_t *remainders, uint64_t *results) {
    const Extent extent = extents[blockIdx.x];
    const uint64_t segments = segments_of(extent);
    uint64_t *nodes = remainders + extent.first_segment;
    uint32_t level = 20;
    for (uint64_t span = 1; span < segments; span *= 2, level++) {
        for (uint64_t node = 2 * span * threadIdx.x; node + span < segments; node += 2 * span * JOIN_THREADS)
            nodes[node] ^= multiply(nodes[node + span], TABLES.square[level]);
        __syncthreads();
    }
    if (threadIdx.x == 0) results[blockIdx.x] = nodes[0];
}
