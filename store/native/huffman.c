/*
 * zstd frames of literals only: Huffman codes, and no search for matches.
 *
 * In a byte plane of a float there is nothing to be found but matches of four bytes that cost more than they
 * save, and looking for them takes most of zstd's time. Measured on differences of bfloat16 weights, 1 to 2 bits a
 * byte: 13 % less room, encoding at 0.9 GB/s instead of 0.4, decoding at 1.9 instead of 0.8. Any zstd decoder reads
 * these frames, and one that is not ours is what the tests compare with.
 *
 * Where nine bytes of ten are the same, zstd is better: a Huffman code takes a bit for each, however many they are.
 *
 * Source: RFC 8878 (3.1.1 frames and blocks, 4.2 Huffman coding).
 */
#include "huffman.h"

#include <string.h>

#include "bits.h"
#include "huffman_code.h"

#define MAX_BLOCK (128 * 1024)
#define MIN_LENGTH 1024
#define FRAME_HEADER 9
#define BLOCK_OVERHEAD (DESCRIPTION_ROOM + 200) /* headers, jump table, ends of streams, room for whole words */

/* ---- the code --------------------------------------------------------------------------------------- */

/* In eight tables: an increment waits for the one before of the same counter, and most bytes are alike. */
static __attribute__((noinline)) void count_bytes(const uint8_t *source, size_t length, uint32_t *counts)
{
    uint32_t part[8][SYMBOLS];
    size_t at = 0;
    memset(part, 0, sizeof(part));
    for (; at + 8 <= length; at += 8) {
        uint64_t word = *(const any64 *)(source + at);
        part[0][word & 255]++;
        part[1][word >> 8 & 255]++;
        part[2][word >> 16 & 255]++;
        part[3][word >> 24 & 255]++;
        part[4][word >> 32 & 255]++;
        part[5][word >> 40 & 255]++;
        part[6][word >> 48 & 255]++;
        part[7][word >> 56]++;
    }
    for (; at < length; at++)
        part[0][source[at]]++;
    memcpy(counts, part[0], sizeof(part[0]));
    for (int table = 1; table < 8; table++)
        for (int symbol = 0; symbol < SYMBOLS; symbol++)
            counts[symbol] += part[table][symbol];
}

/* The symbols that occur, the rarest first; how many they are. A radix sort, as counts have 18 bits at most. */
static int sort_symbols(const uint32_t *counts, uint8_t *sorted)
{
    uint8_t room[2][SYMBOLS], *from = room[0], *to = room[1];
    int used = 0;
    for (int symbol = 0; symbol < SYMBOLS; symbol++)
        if (counts[symbol])
            from[used++] = (uint8_t)symbol;
    for (int shift = 0; shift < 18; shift += 6) {
        int start[65] = {0};
        for (int at = 0; at < used; at++)
            start[(counts[from[at]] >> shift & 63) + 1]++;
        for (int digit = 0; digit < 64; digit++)
            start[digit + 1] += start[digit];
        for (int at = 0; at < used; at++)
            to[start[counts[from[at]] >> shift & 63]++] = from[at];
        uint8_t *other = from;
        from = to;
        to = other;
    }
    memcpy(sorted, from, (size_t)used);
    return used;
}

/* Huffman's algorithm with two queues, leaves and inner nodes, both in ascending order. At least 2 symbols. */
static void huffman_lengths(const uint32_t *counts, const uint8_t *sorted, int used, uint8_t *length)
{
    uint32_t weight[2 * SYMBOLS];
    uint16_t parent[2 * SYMBOLS];
    uint16_t depth[2 * SYMBOLS];
    int leaf = 0, inner = used, nodes = used;
    for (int at = 0; at < used; at++)
        weight[at] = counts[sorted[at]];
    for (; nodes < 2 * used - 1; nodes++) {
        weight[nodes] = 0;
        for (int child = 0; child < 2; child++) {
            int taken = leaf < used && (inner == nodes || weight[leaf] <= weight[inner]) ? leaf++ : inner++;
            weight[nodes] += weight[taken];
            parent[taken] = (uint16_t)nodes;
        }
    }
    depth[nodes - 1] = 0;
    for (int at = nodes - 2; at >= 0; at--)
        depth[at] = (uint16_t)(depth[parent[at]] + 1);
    for (int at = 0; at < used; at++)
        length[sorted[at]] = (uint8_t)(depth[at] < 255 ? depth[at] : 255);
}

/* No length above MAX_BITS, and still a complete code: the sum of 2^-length is 1. */
static void limit_lengths(const uint8_t *sorted, int used, uint8_t *length)
{
    int32_t sum = 0;
    for (int at = 0; at < used; at++) {
        if (length[sorted[at]] > MAX_BITS)
            length[sorted[at]] = MAX_BITS;
        sum += 1 << (MAX_BITS - length[sorted[at]]);
    }
    /* Too much: the rarest that can get longer do. */
    for (int at = 0; sum > 1 << MAX_BITS; at = at + 1 < used ? at + 1 : 0)
        if (length[sorted[at]] < MAX_BITS)
            sum -= 1 << (MAX_BITS - ++length[sorted[at]]);
    /* Too little: the most frequent that fit get shorter. What is left is a multiple of the smallest share. */
    while (sum < 1 << MAX_BITS)
        for (int at = used - 1; at >= 0; at--)
            while (length[sorted[at]] > 1 && sum + (1 << (MAX_BITS - length[sorted[at]])) <= 1 << MAX_BITS)
                sum += 1 << (MAX_BITS - length[sorted[at]]--);
}

static int make_code(const uint32_t *counts, struct code *code)
{
    uint8_t sorted[SYMBOLS];
    int used = sort_symbols(counts, sorted);
    if (used < 2)
        return -1;
    memset(code->length, 0, sizeof(code->length));
    huffman_lengths(counts, sorted, used, code->length);
    limit_lengths(sorted, used, code->length);
    code->longest = code->last = 0;
    for (int symbol = 0; symbol < SYMBOLS; symbol++) {
        if (code->length[symbol])
            code->last = symbol;
        if (code->length[symbol] > code->longest)
            code->longest = code->length[symbol];
    }
    return 0;
}

/* ---- literals, blocks, the frame --------------------------------------------------------------------- */

/* Codes of the longest length come first, those of a length in the order of their symbols. */
static void assign(const struct code *code, uint32_t *table)
{
    uint32_t next = 0;
    for (int length = code->longest; length > 0; length--) {
        for (int symbol = 0; symbol <= code->last; symbol++)
            if (code->length[symbol] == length)
                table[symbol] = next++ << 8 | (uint32_t)length;
        next >>= 1;
    }
}

static inline void put_symbol(struct bits *bits, const uint32_t *table, uint8_t symbol)
{
    uint32_t entry = table[symbol];
    put(bits, entry >> 8, entry & 255);
}

static uint8_t *write_stream(const uint8_t *source, size_t length, const uint32_t *table, uint8_t *out)
{
    struct bits bits = {0, 0, out};
    size_t at = length;
    for (; at % 4; at--)
        put_symbol(&bits, table, source[at - 1]);
    flush(&bits);
    for (; at; at -= 4) {
        put_symbol(&bits, table, source[at - 1]);
        put_symbol(&bits, table, source[at - 2]);
        put_symbol(&bits, table, source[at - 3]);
        put_symbol(&bits, table, source[at - 4]);
        flush(&bits);
    }
    return close_bits(&bits);
}

/* Whether a code takes less than 98.5 % of the room, and no value is nine of ten: from there on zstd is better. */
static int is_worth_it(const uint32_t *counts, const struct code *code, size_t length)
{
    uint64_t bits = 0;
    for (int symbol = 0; symbol < SYMBOLS; symbol++) {
        if (counts[symbol] > length / 10 * 9)
            return 0;
        bits += (uint64_t)counts[symbol] * code->length[symbol];
    }
    return bits / 8 < length * 985 / 1000;
}

/*
 * Whether a few KiB of the source look like noise, or like one value most of the time. To count all of it takes
 * longer than anything else, and longest for equal bytes.
 */
static int is_hopeless(const uint8_t *source, size_t length)
{
    uint32_t counts[SYMBOLS];
    uint64_t squares = 0;
    size_t part = length < 4096 ? length : 4096;
    count_bytes(source + (length - part) / 2, part, counts);
    for (int symbol = 0; symbol < SYMBOLS; symbol++) {
        if (counts[symbol] > part / 16 * 15)
            return 1;
        squares += (uint64_t)counts[symbol] * counts[symbol];
    }
    /* Equally frequent bytes: part + part^2 / 256 on average; a fifth more is far from all noise. */
    return 5 * 256 * (squares - part) < 6 * part * part;
}

static uint8_t *write_block(const uint8_t *source, size_t length, int is_last, uint8_t *out)
{
    uint32_t counts[SYMBOLS], table[SYMBOLS];
    struct code code;
    count_bytes(source, length, counts);
    if (make_code(counts, &code) < 0 || !is_worth_it(counts, &code, length))
        return NULL;
    uint8_t *literals = out + 3, *tree = literals + 5, *jumps = write_code(&code, tree);
    if (!jumps)
        return NULL;
    assign(&code, table);
    uint8_t *stream = jumps + 6;
    size_t quarter = (length + 3) / 4;
    for (int which = 0; which < 4; which++) {
        size_t start = quarter * (size_t)which;
        uint8_t *end = write_stream(source + start, which < 3 ? quarter : length - start, table, stream);
        if (which < 3) {
            jumps[2 * which] = (uint8_t)(end - stream);
            jumps[2 * which + 1] = (uint8_t)((end - stream) >> 8);
        }
        stream = end;
    }
    *stream++ = 0; /* no sequences */
    /* With the description of the code it may be no shorter after all, and a longer block is no block. */
    if ((size_t)(stream - literals) >= length)
        return NULL;
    uint64_t size = (uint64_t)(stream - 1 - tree);
    uint64_t header = 2 | 3 << 2 | (uint64_t)length << 4 | size << 22;
    memcpy(literals, &header, 5);
    uint32_t block = (uint32_t)is_last | 2 << 1 | (uint32_t)(stream - literals) << 3;
    memcpy(out, &block, 3);
    return stream;
}

size_t huffman_room(size_t length)
{
    return FRAME_HEADER + length + (length / MAX_BLOCK + 1) * BLOCK_OVERHEAD;
}

size_t huffman_frame(const uint8_t *source, size_t length, uint8_t *target)
{
    static const uint8_t magic[] = {0x28, 0xb5, 0x2f, 0xfd, 0xa0}; /* one segment, a size of 4 bytes */
    uint32_t size = (uint32_t)length;
    uint8_t *out = target + FRAME_HEADER;
    if (length < MIN_LENGTH || length > UINT32_MAX || is_hopeless(source, length))
        return 0;
    memcpy(target, magic, sizeof(magic));
    memcpy(target + sizeof(magic), &size, sizeof(size));
    for (size_t at = 0; at < length; at += MAX_BLOCK) {
        size_t part = length - at < MAX_BLOCK ? length - at : MAX_BLOCK;
        out = part < MIN_LENGTH ? NULL : write_block(source + at, part, at + part == length, out);
        if (!out)
            return 0;
    }
    return (size_t)(out - target) < length ? (size_t)(out - target) : 0;
}
