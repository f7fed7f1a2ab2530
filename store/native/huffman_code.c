/*
 * How a Huffman code is described in a zstd frame: a weight for each symbol, in FSE or in 4 bits.
 *
 * A weight is 0 for a symbol that does not occur, else the longest length of a code, plus 1, less its own.
 *
 * Source: RFC 8878, 4.2.1 (Huffman tree description) and 4.1 (FSE).
 */
#include "huffman_code.h"

#include <stddef.h>

#include "bits.h"

#define TABLE_LOG 6
#define TABLE_SIZE (1 << TABLE_LOG)
#define WEIGHTS (MAX_BITS + 1)

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

/* The last symbol's weight follows from the others, and is not written. */
uint8_t *write_code(const struct code *code, uint8_t *out)
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
