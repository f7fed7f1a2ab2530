// BLAKE3-256 of many extents, compared where they lie.
//
// One rule: the CPU defines the answer; tests/gpu compares this very text, compiled for the CPU, with the
// `blake3` package. Source: the BLAKE3 specification, sections 2.2 (compression), 2.4 (leaves) and 2.5 (tree).
// What BLAKE3 calls a chunk is a leaf here, since a chunk of ckptfs is a whole extent.
//
// blake3_segments reduces 128 leaves to one chaining value: a perfect subtree, or the right edge of the tree.
// blake3_extents joins the values of each extent. Pairing neighbours level by level and passing on what has
// no partner gives the specification's tree (its left subtrees are the largest powers of two).
#include "load.cuh"

constexpr uint32_t CHUNK_START = 1;
constexpr uint32_t CHUNK_END = 2;
constexpr uint32_t PARENT = 4;
constexpr uint32_t ROOT = 8;

constexpr uint32_t IV0 = 0x6a09e667, IV1 = 0xbb67ae85, IV2 = 0x3c6ef372, IV3 = 0xa54ff53a;
constexpr uint32_t IV4 = 0x510e527f, IV5 = 0x9b05688c, IV6 = 0x1f83d9ab, IV7 = 0x5be0cd19;

__device__ __forceinline__ uint32_t rotate_right(uint32_t word, uint32_t bits) {
    return __funnelshift_r(word, word, bits);
}

// left + right, on the pipe of multiplications: logic and rotations fill the other one (two thirds of all
// instructions), and the compiler leaves sums of three there too. No grid here has a depth, but the compiler
// cannot know that gridDim.z is 1.
__device__ __forceinline__ uint32_t add(uint32_t left, uint32_t right) {
    return left * gridDim.z + right;
}

__device__ __forceinline__ void mix(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d, uint32_t x, uint32_t y) {
    a = add(add(a, x), b);
    d = rotate_right(d ^ a, 16);
    c = add(c, d);
    b = rotate_right(b ^ c, 12);
    a = add(add(a, y), b);
    d = rotate_right(d ^ a, 8);
    c = add(c, d);
    b = rotate_right(b ^ c, 7);
}

__device__ __forceinline__ void set_to_iv(uint32_t (&value)[8]) {
    value[0] = IV0, value[1] = IV1, value[2] = IV2, value[3] = IV3;
    value[4] = IV4, value[5] = IV5, value[6] = IV6, value[7] = IV7;
}

// Renames registers once the rounds are unrolled; costs no instruction.
__device__ __forceinline__ void permute(uint32_t (&m)[16]) {
    const uint32_t next[16] = {m[2], m[6],  m[3],  m[10], m[7], m[0],  m[4],  m[13],
                               m[1], m[11], m[12], m[5],  m[9], m[14], m[15], m[8]};
#pragma unroll
    for (int i = 0; i < 16; i++) m[i] = next[i];
}

// `value` becomes the chaining value after `m`, of which `length` bytes count. `m` is used up.
__device__ __forceinline__ void compress(uint32_t (&value)[8], uint32_t (&m)[16], uint64_t counter,
                                         uint32_t length, uint32_t flags) {
    uint32_t v[16] = {value[0], value[1], value[2], value[3],
                      value[4], value[5], value[6], value[7],
                      IV0,      IV1,      IV2,      IV3,
                      static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), length, flags};
#pragma unroll
    for (int round = 0; round < 7; round++) {
        mix(v[0], v[4], v[8], v[12], m[0], m[1]);
        mix(v[1], v[5], v[9], v[13], m[2], m[3]);
        mix(v[2], v[6], v[10], v[14], m[4], m[5]);
        mix(v[3], v[7], v[11], v[15], m[6], m[7]);
        mix(v[0], v[5], v[10], v[15], m[8], m[9]);
        mix(v[1], v[6], v[11], v[12], m[10], m[11]);
        mix(v[2], v[7], v[8], v[13], m[12], m[13]);
        mix(v[3], v[4], v[9], v[14], m[14], m[15]);
        permute(m);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) value[i] = v[i] ^ v[i + 8];
}

// The chaining value of leaf number `leaf` of the extent; `root` is ROOT if it is the only one, else 0.
__device__ __forceinline__ void hash_leaf(const Extent &extent, uint64_t leaf, uint32_t root, uint32_t (&value)[8]) {
    const uint64_t start = leaf * LEAF_BYTES;
    const uint64_t rest = extent.length - start;
    const uint32_t length = rest < LEAF_BYTES ? static_cast<uint32_t>(rest) : LEAF_BYTES;
    set_to_iv(value);
    uint32_t flags = CHUNK_START;
    uint32_t done = 0;
    // An empty leaf has one block of no bytes.
    for (;;) {
        const uint32_t left = length - done;
        const bool last = left <= BLOCK_BYTES;
        uint32_t words[16];
        load_block(extent, static_cast<int64_t>(start + done), words);
        if (last) flags |= CHUNK_END | root;
        compress(value, words, leaf, last ? left : BLOCK_BYTES, flags);
        if (last) return;
        flags = 0;
        done += BLOCK_BYTES;
    }
}

__device__ __forceinline__ void hash_parent(const uint32_t *left, const uint32_t *right, uint32_t root,
                                            uint32_t (&value)[8]) {
    uint32_t words[16];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        words[i] = left[i];
        words[i + 8] = right[i];
    }
    set_to_iv(value);
    compress(value, words, 0, BLOCK_BYTES, PARENT | root);
}

// Grid: one block of SEGMENT_LEAVES threads for each segment of the launch.
// extent_of: u32 for each segment, ascending. values: 8 words for each segment (out).
extern "C" __global__ void __launch_bounds__(SEGMENT_LEAVES)
    blake3_segments(const Extent *extents, const uint32_t *extent_of, uint32_t *values) {
    // 9 words a row, so that the rows of neighbours begin in different banks.
    __shared__ uint32_t tree[SEGMENT_LEAVES][9];
    const uint32_t segment = blockIdx.x;
    const uint32_t thread = threadIdx.x;
    const Extent extent = extents[extent_of[segment]];
    const uint64_t first_leaf = (segment - extent.first_segment) * SEGMENT_LEAVES;
    const uint64_t all_leaves = (extent.length + LEAF_BYTES - 1) / LEAF_BYTES;
    const uint64_t rest = all_leaves == 0 ? 1 : all_leaves - first_leaf;
    const uint32_t leaves = rest < SEGMENT_LEAVES ? static_cast<uint32_t>(rest) : SEGMENT_LEAVES;
    const uint32_t root = segments_of(extent) == 1 ? ROOT : 0;

    if (thread < leaves) {
        uint32_t value[8];
        hash_leaf(extent, first_leaf + thread, leaves == 1 ? root : 0, value);
#pragma unroll
        for (int i = 0; i < 8; i++) tree[thread][i] = value[i];
    }
    // Each level joins nodes that are `span` apart, in place. The first threads do it, so that warps retire.
    for (uint32_t span = 1; span < leaves; span *= 2) {
        __syncthreads();
        const uint32_t node = 2 * span * thread;
        if (node + span < leaves) {
            uint32_t value[8];
            hash_parent(tree[node], tree[node + span], 2 * span >= leaves ? root : 0, value);
#pragma unroll
            for (int i = 0; i < 8; i++) tree[node][i] = value[i];
        }
    }
    __syncthreads();
    if (thread < 8) values[8 * static_cast<uint64_t>(segment) + thread] = tree[0][thread];
}

// Grid: one block of JOIN_THREADS threads for each extent. expected: 8 words for each extent.
// bad: a byte for each extent, 1 if its hash is not the expected one (out). bad_count is added to.
extern "C" __global__ void __launch_bounds__(JOIN_THREADS)
    blake3_extents(const Extent *extents, uint32_t *values, const uint32_t *expected, uint8_t *bad,
                   uint32_t *bad_count) {
    const uint32_t index = blockIdx.x;
    const Extent extent = extents[index];
    const uint64_t segments = segments_of(extent);
    uint32_t *nodes = values + 8 * extent.first_segment;
    for (uint64_t span = 1; span < segments; span *= 2) {
        const uint32_t root = 2 * span >= segments ? ROOT : 0;
        for (uint64_t node = 2 * span * threadIdx.x; node + span < segments; node += 2 * span * JOIN_THREADS) {
            uint32_t value[8];
            hash_parent(nodes + 8 * node, nodes + 8 * (node + span), root, value);
#pragma unroll
            for (int i = 0; i < 8; i++) nodes[8 * node + i] = value[i];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        uint32_t difference = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) difference |= nodes[i] ^ expected[8 * static_cast<uint64_t>(index) + i];
        bad[index] = difference != 0;
        if (difference != 0) atomicAdd(bad_count, 1u);
    }
}
