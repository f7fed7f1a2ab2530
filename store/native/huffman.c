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
 * Source: RFC 8878 (3.1.1 frames and blocks, 4.2 Huffman coding, 4.1 FSE, in which the code itself is written).
 */
#include "huffman.h"

#include <string.h>

#define MAX_BLOCK (128 * 1024)
#define MIN_LENGTH 1024
#define MAX_BITS 11
#define SYMBOLS 256
#define TABLE_LOG 6
#define TABLE_SIZE (1 << TABLE_LOG)
#define WEIGHTS (MAX_BITS + 1)
#define FRAME_HEADER 9
#define BLOCK_OVERHEAD 512 /* headers, the code, jump table, ends of streams, and room for whole words */

typedef uint64_t any64 __attribute__((aligned(1), may_alias));

/* ---- bits, the first one lowest --------------------------------------------------------------------- */

struct bits {
    uint64_t held;
    unsigned count;
    uint8_t *out;
};

static inline void put(struct bits *bits, uint64_t value, unsigned count)
{
    bits->held |= value << bits->count;
    bits->count += count;
}

/* Writes whole bytes; up to 8 bytes behind them are overwritten. */
static inline void flush(struct bits *bits)
{
    unsigned whole = bits->count >> 3;
    *(any64 *)bits->out = bits->held;
    bits->out += whole;
    bits->held = whole == 8 ? 0 : bits->held >> (8 * whole);
    bits->count &= 7;
}

/* The mark behind the last bit, from which a decoder begins. */
static uint8_t *close_bits(struct bits *bits)
{
    put(bits, 1, 1);
    flush(bits);
    return bits->out + (bits->count > 0);
}

/* ---- the code --------------------------------------------------------------------------------------- */

struct code {
    uint8_t length[SYMBOLS]; /* of the code of each symbol, 0 for one that does not occur */
    int longest, last;       /* the longest length, and the highest symbol that occurs */
};

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

/* ---- how the code is written: weights, in FSE or in 4 bits each -------------------------------------- */

/* Counts that sum up to TABLE_SIZE, none of those that occur 0. */
static void normalise(const int *counts, int total, int *norm)
{
    int sum = 0, most = 0;
    for (int weight = 0; weight < WEIGHTS; weight++) {
        norm[weight] = counts[weight] ? counts[weight] * TABLE_SIZE / total : 0;
        if (counts[weight] && !norm[weight])
            norm[weight] = 1;
        sum += norm[weight];
        if (norm[weight] > norm[most])
            most = weight;
    }
    for (; sum > TABLE_SIZE; sum--) {
        for (int weight = 0; weight < WEIGHTS; weight++)
            if (norm[weight] > norm[most])
                most = weight;
        norm[most]--;
    }
    norm[most] += TABLE_SIZE - sum;
}

static uint8_t *write_norm(const int *norm, uint8_t *out)
{
    struct bits bits = {0, 0, out};
    int remaining = TABLE_SIZE + 1, threshold = TABLE_SIZE, width = TABLE_LOG + 1, was_zero = 0;
    put(&bits, TABLE_LOG - 5, 4);
    for (int weight = 0; weight < WEIGHTS && remaining > 1;) {
        if (was_zero) {
            int start = weight;
            while (!norm[weight])
                weight++;
            for (; weight >= start + 3; start += 3)
                put(&bits, 3, 2);
            put(&bits, (uint64_t)(weight - start), 2);
        }
        int count = norm[weight++], most = 2 * threshold - 1 - remaining;
        remaining -= count++;
        was_zero = count == 1;
        if (count >= threshold)
            count += most;
        put(&bits, (uint64_t)count, (unsigned)(width - (count < most)));
        for (; remaining < threshold; threshold >>= 1)
            width--;
        flush(&bits);
    }
    flush(&bits);
    return bits.out + (bits.count > 0);
}

struct fse {
    uint16_t next[TABLE_SIZE];
    int32_t find[WEIGHTS];
    uint32_t bits[WEIGHTS];
};

static void build_fse(const int *norm, struct fse *fse)
{
    uint8_t spread[TABLE_SIZE];
    int start[WEIGHTS], total = 0, position = 0;
    for (int weight = 0; weight < WEIGHTS; weight++)
        for (int n = 0; n < norm[weight]; n++) {
            spread[position] = (uint8_t)weight;
            position = (position + (TABLE_SIZE >> 1) + (TABLE_SIZE >> 3) + 3) & (TABLE_SIZE - 1);
        }
    for (int weight = 0; weight < WEIGHTS; weight++) {
        int most = TABLE_LOG;
        start[weight] = total;
        for (int span = norm[weight] - 1; span > 1; span >>= 1)
            most--;
        fse->bits[weight] = ((uint32_t)most << 16) - ((uint32_t)norm[weight] << most);
        fse->find[weight] = total - norm[weight];
        total += norm[weight];
    }
    for (int at = 0; at < TABLE_SIZE; at++)
        fse->next[start[spread[at]]++] = (uint16_t)(TABLE_SIZE + at);
}

static uint32_t first_state(const struct fse *fse, int weight)
{
    uint32_t count = (fse->bits[weight] + (1 << 15)) >> 16;
    uint32_t value = (count << 16) - fse->bits[weight];
    return fse->next[(int32_t)(value >> count) + fse->find[weight]];
}

static void encode_weight(struct bits *bits, const struct fse *fse, uint32_t *state, int weight)
{
    uint32_t count = (*state + fse->bits[weight]) >> 16;
    put(bits, *state & ((1u << count) - 1), count);
    *state = fse->next[(int32_t)(*state >> count) + fse->find[weight]];
    flush(bits);
}

/* Two states take turns, from the last weight to the first. At least 3 weights, of at least 2 kinds. */
static uint8_t *write_weights(const uint8_t *weights, int count, const int *norm, uint8_t *out)
{
    struct fse fse;
    struct bits bits = {0, 0, write_norm(norm, out)};
    uint32_t state[2];
    build_fse(norm, &fse);
    int at = count - 1;
    state[at & 1] = first_state(&fse, weights[at]), at--;
    state[at & 1] = first_state(&fse, weights[at]), at--;
    for (; at >= 0; at--)
        encode_weight(&bits, &fse, &state[at & 1], weights[at]);
    for (int which = 1; which >= 0; which--) {
        put(&bits, state[which] & (TABLE_SIZE - 1), TABLE_LOG);
        flush(&bits);
    }
    return close_bits(&bits);
}

/* The code's description; NULL if it has none that is allowed. The last symbol's weight follows from the others. */
static uint8_t *write_code(const struct code *code, uint8_t *out)
{
    uint8_t weights[SYMBOLS + 1];
    int counts[WEIGHTS] = {0}, norm[WEIGHTS], kinds = 0;
    for (int symbol = 0; symbol < code->last; symbol++) {
        int length = code->length[symbol];
        weights[symbol] = (uint8_t)(length ? code->longest + 1 - length : 0);
        kinds += !counts[weights[symbol]]++;
    }
    weights[code->last] = 0;
    if (kinds > 1 && code->last > 2) {
        normalise(counts, code->last, norm);
        uint8_t *end = write_weights(weights, code->last, norm, out + 1);
        if (end - out - 1 < 128) {
            *out = (uint8_t)(end - out - 1);
            return end;
        }
    }
    if (code->last > 128)
        return NULL;
    *out++ = (uint8_t)(127 + code->last);
    for (int symbol = 0; symbol < code->last; symbol += 2)
        *out++ = (uint8_t)(weights[symbol] << 4 | weights[symbol + 1]);
    return out;
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
    return (size_t)(out - target);
}
