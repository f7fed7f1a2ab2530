/* Differences to a parent as rANS with contexts, without Python; see context.c. */
#ifndef CKPTFS_CONTEXT_H
#define CKPTFS_CONTEXT_H
#include <stddef.h>
#include <stdint.h>

#define EXPONENTS 256
#define SYMBOLS 128 /* room for those of 32 bits */
#define MOST_CONTEXTS 16
#define SCALE_BITS 12
#define SCALE (1u << SCALE_BITS)

/* Elements of 2 or 4 bytes, of which `fraction_bits` lie below the exponent, beside those of the parent. */
struct pair {
    const uint8_t *source, *parent;
    size_t count; /* of elements */
    int width, fraction_bits;
};

/* Adds to a counter for each exponent of the parent and symbol. */
void count_symbols(const struct pair *pair, uint32_t (*counts)[SYMBOLS]);

/* The most bytes that `pack_context` writes. */
size_t context_room(size_t count);

/*
 * What stands behind the tables; how many bytes, 0 if a symbol has no frequency. `context_of` is that of each
 * exponent; each row of frequencies sums up to SCALE.
 */
size_t pack_context(
    const struct pair *pair, const uint8_t *context_of, const uint16_t (*frequencies)[SYMBOLS], uint8_t *target);

/*
 * The `length` bytes that a body stands for; 0 if it is not one (or there is no memory). Of the pair the source is
 * not used.
 */
int unpack_context(const struct pair *pair, const uint8_t *body, size_t size, uint8_t *target, size_t length);

#endif
