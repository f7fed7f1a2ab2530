/* Bits written one behind the other, the first one lowest: what zstd reads from the end. */
#ifndef CKPTFS_BITS_H
#define CKPTFS_BITS_H
#include <stdint.h>

typedef uint64_t any64 __attribute__((aligned(1), may_alias));

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
static inline uint8_t *close_bits(struct bits *bits)
{
    put(bits, 1, 1);
    flush(bits);
    return bits->out + (bits->count > 0);
}

#endif
