/*
 * Differences to a parent, coded by how large they are, with the parent's exponent as context: codec 5.
 *
 * An optimizer's steps are about as large for all values of a tensor, so the exponent says how many units of the
 * last place a step comes to. One symbol for each value is its difference's magnitude in a quarter of an octave;
 * the bits below it are as good as noise, and stand as they are.
 *
 * store/codecs/context_twin.py says in numpy what each function does. 32 states take turns: here they hide each
 * other's latency, there a row of them is one operation. The tables take 16 KiB a context.
 *
 * Source: store/FORMAT.md, "Contexts"; J. Duda, arXiv:1311.2540; F. Giesen, arXiv:1402.3392 (interleaving).
 */
#include "context.h"

#include <stdlib.h>
#include <string.h>

#include "bits.h"

#define BLOCK 1024
#define LANES 32
#define LOWEST (1u << 16) /* of a state, and what it begins with */
#define HEADER (4 + 4 * LANES)
#define LOW_BITS_ROOM 16 /* what the writer of bits overwrites */

typedef uint16_t any16 __attribute__((aligned(1), may_alias));
typedef uint32_t any32 __attribute__((aligned(1), may_alias));

/* ---- values ------------------------------------------------------------------------------------------ */

#define DEFINE_ELEMENT(T, S, BITS)                                                                         \
    static inline T ordered##BITS(T x)                                                                     \
    {                                                                                                      \
        return (T)(x ^ (T)((T)((S)x >> (BITS - 1)) & (T)((T)~(T)0 >> 1)));                                 \
    }                                                                                                      \
    static void exponents##BITS(const struct pair *pair, size_t at, size_t n, uint8_t *exponents)          \
    {                                                                                                      \
        const any##BITS *p = (const any##BITS *)pair->parent + at;                                         \
        uint32_t mask = (1u << (BITS - 1 - pair->fraction_bits)) - 1;                                      \
        for (size_t i = 0; i < n; i++)                                                                     \
            exponents[i] = (uint8_t)((uint32_t)p[i] >> pair->fraction_bits & mask);                        \
    }                                                                                                      \
    static void differences##BITS(const struct pair *pair, size_t at, size_t n, uint32_t *values)          \
    {                                                                                                      \
        const any##BITS *x = (const any##BITS *)pair->source + at, *p = (const any##BITS *)pair->parent + at; \
        for (size_t i = 0; i < n; i++) {                                                                   \
            T d = (T)(ordered##BITS(x[i]) - ordered##BITS(p[i]));                                          \
            values[i] = (T)((T)(d << 1) ^ (T)((S)d >> (BITS - 1)));                                        \
        }                                                                                                  \
    }                                                                                                      \
    static void restore##BITS(                                                                             \
        const struct pair *pair, size_t at, size_t n, const uint32_t *values, uint8_t *target)             \
    {                                                                                                      \
        const any##BITS *p = (const any##BITS *)pair->parent + at;                                         \
        any##BITS *x = (any##BITS *)target + at;                                                           \
        for (size_t i = 0; i < n; i++) {                                                                   \
            T z = (T)values[i], d = (T)((T)(z >> 1) ^ (T)(0 - (T)(z & 1)));                                \
            x[i] = ordered##BITS((T)(d + ordered##BITS(p[i])));                                            \
        }                                                                                                  \
    }

DEFINE_ELEMENT(uint16_t, int16_t, 16)
DEFINE_ELEMENT(uint32_t, int32_t, 32)

static void exponents_of(const struct pair *pair, size_t at, size_t n, uint8_t *exponents)
{
    (pair->width == 2 ? exponents16 : exponents32)(pair, at, n, exponents);
}

static void differences_of(const struct pair *pair, size_t at, size_t n, uint32_t *values)
{
    (pair->width == 2 ? differences16 : differences32)(pair, at, n, values);
}

static inline uint32_t low_bits_of_value(uint32_t value)
{
    return (uint32_t)(29 - __builtin_clz(value | 7));
}

static inline uint32_t low_bits_of_symbol(uint32_t symbol)
{
    uint32_t quarters = symbol >> 2;
    return quarters - (quarters > 0);
}

static size_t block_at(const struct pair *pair, size_t at)
{
    return pair->count - at < BLOCK ? pair->count - at : BLOCK;
}

void count_symbols(const struct pair *pair, uint32_t (*counts)[SYMBOLS])
{
    uint32_t values[BLOCK];
    uint8_t exponents[BLOCK];
    for (size_t at = 0; at < pair->count; at += BLOCK) {
        size_t n = block_at(pair, at);
        differences_of(pair, at, n, values);
        exponents_of(pair, at, n, exponents);
        for (size_t i = 0; i < n; i++) {
            uint32_t low = low_bits_of_value(values[i]);
            counts[exponents[i]][4 * low + (values[i] >> low)]++;
        }
    }
}

/* ---- from values to bytes ---------------------------------------------------------------------------- */

struct share {
    uint16_t start, frequency;
};

size_t context_room(size_t count)
{
    return HEADER + 6 * count + LOW_BITS_ROOM;
}

/* Writes words down to what is returned, the last value's first; NULL if a symbol has no frequency. */
static uint8_t *pack_symbols(
    const struct pair *pair, const uint8_t *context_of, const struct share (*shares)[SYMBOLS], uint32_t *states,
    uint8_t *words)
{
    uint32_t values[BLOCK];
    uint8_t exponents[BLOCK];
    for (size_t end = pair->count; end;) {
        size_t at = (end - 1) / BLOCK * BLOCK, n = end - at;
        differences_of(pair, at, n, values);
        exponents_of(pair, at, n, exponents);
        for (size_t i = n; i-- > 0;) {
            uint32_t low = low_bits_of_value(values[i]), x = states[i % LANES];
            struct share share = shares[context_of[exponents[i]]][4 * low + (values[i] >> low)];
            if (!share.frequency)
                return NULL;
            /* Whether a state gives a word cannot be foreseen, so nothing branches on it. */
            uint32_t all = 0u - (x >> (32 - SCALE_BITS) >= share.frequency);
            *(any16 *)(words - 2) = (uint16_t)x;
            words -= 2 & all;
            x ^= (x ^ x >> 16) & all;
            states[i % LANES] = (x / share.frequency << SCALE_BITS) + x % share.frequency + share.start;
        }
        end = at;
    }
    return words;
}

static uint8_t *pack_low_bits(const struct pair *pair, uint8_t *target)
{
    uint32_t values[BLOCK];
    struct bits bits = {0, 0, target};
    for (size_t at = 0; at < pair->count; at += BLOCK) {
        size_t n = block_at(pair, at);
        differences_of(pair, at, n, values);
        for (size_t i = 0; i < n; i++) {
            uint32_t low = low_bits_of_value(values[i]);
            put(&bits, values[i] & ((1u << low) - 1), low);
            flush(&bits);
        }
    }
    return bits.out + (bits.count > 0);
}

size_t pack_context(
    const struct pair *pair, const uint8_t *context_of, const uint16_t (*frequencies)[SYMBOLS], uint8_t *target)
{
    struct share shares[MOST_CONTEXTS][SYMBOLS];
    uint32_t states[LANES];
    uint8_t *words = target + HEADER, *end = words + 2 * pair->count;
    for (int context = 0; context < MOST_CONTEXTS; context++) {
        uint32_t start = 0;
        for (int symbol = 0; symbol < SYMBOLS; symbol++) {
            shares[context][symbol] = (struct share){(uint16_t)start, frequencies[context][symbol]};
            start += frequencies[context][symbol];
        }
    }
    for (int lane = 0; lane < LANES; lane++)
        states[lane] = LOWEST;
    uint8_t *first = pack_symbols(pair, context_of, (const struct share(*)[SYMBOLS])shares, states, end);
    if (!first)
        return 0;
    size_t size = (size_t)(end - first);
    memmove(words, first, size);
    *(any32 *)target = (uint32_t)(size / 2);
    memcpy(target + 4, states, sizeof(states));
    return (size_t)(pack_low_bits(pair, words + size) - target);
}

/* ---- from bytes to values ---------------------------------------------------------------------------- */

struct reader {
    const uint8_t *at, *end;
};

/* What is found at a slot: symbol, 8 bits; how far from its first slot, 12 bits; its frequency less one, 12 bits. */
typedef uint32_t entry;

static int read_table(struct reader *reader, uint32_t symbols, entry *entries)
{
    uint32_t filled = 0;
    if (reader->end - reader->at < 2)
        return 0;
    uint32_t first = *reader->at++, last = *reader->at++;
    if (first > last || last >= symbols)
        return 0;
    for (uint32_t symbol = first; symbol <= last; symbol++) {
        if (reader->at == reader->end)
            return 0;
        uint32_t frequency = *reader->at++;
        if (frequency >= 0x80) {
            if (reader->at == reader->end || !*reader->at)
                return 0;
            frequency = (frequency & 0x7f) | (uint32_t)*reader->at++ << 7;
        }
        if (frequency > SCALE - filled || (!frequency && (symbol == first || symbol == last)))
            return 0;
        for (uint32_t slot = 0; slot < frequency; slot++)
            entries[filled++] = symbol | slot << 8 | (frequency - 1) << 20;
    }
    return filled == SCALE;
}

/* Fills in the table of each exponent. What is returned holds them, and is to be freed; NULL: they are not tables. */
static entry *read_tables(struct reader *reader, uint32_t symbols, const entry **table_of)
{
    const uint8_t *firsts = reader->at + 1;
    if (reader->at == reader->end || !*reader->at || *reader->at > MOST_CONTEXTS)
        return NULL;
    size_t contexts = *reader->at;
    if ((size_t)(reader->end - reader->at) < contexts)
        return NULL;
    reader->at += contexts;
    for (size_t context = 1; context < contexts; context++)
        if (firsts[context - 1] <= (context > 1 ? firsts[context - 2] : 0))
            return NULL;
    entry *tables = malloc(contexts * SCALE * sizeof(*tables));
    for (size_t context = 0; tables && context < contexts; context++)
        if (!read_table(reader, symbols, tables + context * SCALE)) {
            free(tables);
            return NULL;
        }
    for (size_t exponent = 0, context = 0; tables && exponent < EXPONENTS; exponent++) {
        context += context + 1 < contexts && firsts[context] == exponent;
        table_of[exponent] = tables + context * SCALE;
    }
    return tables;
}

static inline uint32_t next_state(const entry *table, uint32_t state, uint8_t *symbol)
{
    entry found = table[state & (SCALE - 1)];
    *symbol = (uint8_t)found;
    return ((found >> 20) + 1) * (state >> SCALE_BITS) + (found >> 8 & (SCALE - 1));
}

/* The symbols of a row of `n` values; 0 if there are too few words. */
static int unpack_row(
    struct reader *words, const entry *const *table_of, uint32_t *states, const uint8_t *exponents, size_t n,
    uint8_t *symbols)
{
    if (n == LANES && words->end - words->at >= 2 * LANES) {
        /* Whether a state needs a word cannot be foreseen, so nothing branches on it. */
        const uint8_t *at = words->at;
        for (size_t i = 0; i < LANES; i++) {
            uint32_t x = next_state(table_of[exponents[i]], states[i], &symbols[i]);
            uint32_t all = 0u - (x < LOWEST), longer = x << 16 | *(const any16 *)at;
            states[i] = x ^ ((x ^ longer) & all);
            at += 2 & all;
        }
        words->at = at;
        return 1;
    }
    for (size_t i = 0; i < n; i++) {
        uint32_t x = next_state(table_of[exponents[i]], states[i], &symbols[i]);
        if (x < LOWEST) {
            if (words->at == words->end)
                return 0;
            x = x << 16 | *(const any16 *)words->at;
            words->at += 2;
        }
        states[i] = x;
    }
    return 1;
}

/* 57 bits at least from bit `position` of `size` bytes; what lies behind them is 0. */
static inline uint64_t bits_at(const uint8_t *bytes, size_t size, uint64_t position)
{
    size_t at = (size_t)(position >> 3);
    uint64_t word = 0;
    if (size >= 8 && at <= size - 8)
        word = *(const any64 *)(bytes + at);
    else if (at < size)
        memcpy(&word, bytes + at, size - at);
    return word >> (position & 7);
}

/* `low` are the bytes of the low bits. */
static int unpack_values(
    const struct pair *pair, struct reader words, struct reader low, uint32_t *states, const entry *const *table_of,
    uint8_t *target)
{
    uint32_t values[BLOCK];
    uint8_t exponents[BLOCK], symbols[BLOCK];
    size_t size = (size_t)(low.end - low.at);
    uint64_t position = 0;
    for (size_t at = 0; at < pair->count; at += BLOCK) {
        size_t n = block_at(pair, at);
        exponents_of(pair, at, n, exponents);
        for (size_t row = 0; row < n; row += LANES) {
            size_t lanes = n - row < LANES ? n - row : LANES;
            if (!unpack_row(&words, table_of, states, exponents + row, lanes, symbols + row))
                return 0;
        }
        for (size_t i = 0; i < n; i++) {
            uint32_t count = low_bits_of_symbol(symbols[i]), mask = (1u << count) - 1;
            values[i] = (symbols[i] - 4 * count) << count | ((uint32_t)bits_at(low.at, size, position) & mask);
            position += count;
        }
        (pair->width == 2 ? restore16 : restore32)(pair, at, n, values, target);
    }
    return words.at == words.end && (position + 7) / 8 == size && !bits_at(low.at, size, position);
}

int unpack_context(const struct pair *pair, const uint8_t *body, size_t size, uint8_t *target, size_t length)
{
    const entry *table_of[EXPONENTS];
    uint32_t states[LANES];
    struct reader reader = {body, body + size};
    size_t tail = length - pair->count * (size_t)pair->width;
    entry *tables = read_tables(&reader, 32 * (uint32_t)pair->width - 4, table_of);
    int is_done = tables && (size_t)(reader.end - reader.at) >= HEADER + tail;
    if (is_done) {
        size_t words = *(const any32 *)reader.at;
        memcpy(states, reader.at + 4, sizeof(states));
        reader.at += HEADER;
        reader.end -= tail;
        is_done = words <= (size_t)(reader.end - reader.at) / 2;
        for (int lane = 0; lane < LANES; lane++)
            is_done = is_done && states[lane] >= LOWEST;
        if (is_done) {
            struct reader low = {reader.at + 2 * words, reader.end};
            reader.end = low.at;
            is_done = unpack_values(pair, reader, low, states, table_of, target);
            memcpy(target + (length - tail), low.end, tail);
        }
    }
    for (int lane = 0; lane < LANES; lane++)
        is_done = is_done && states[lane] == LOWEST;
    free(tables);
    return is_done;
}
