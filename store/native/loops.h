/* The loops of the tensor codecs, without Python; see loops.c. */
#ifndef CKPTFS_LOOPS_H
#define CKPTFS_LOOPS_H
#include <stddef.h>
#include <stdint.h>

#define MAX_WIDTH 8
#define WORD_SLOTS 2048

/* Parameters of an element; the values are those of the numpy twin. */
#define ROTATED 1
#define SIGN_MAGNITUDE 2

/* Which value stands for an element: itself, rotated left by one bit, or its difference to the parent's. */
enum transform { PLAIN, ROTATE, DIFFERENCE, DIFFERENCE_OF_SIGN_MAGNITUDE, TRANSFORMS };

enum transform transform_of(int parameters, int has_parent);

/* What is done to elements of 1 << power bytes; `parent` is NULL where the transform needs none. */
struct work {
    int power;
    enum transform how;
    const uint8_t *parent;
    size_t count; /* of elements */
};

void split_planes(const struct work *work, const uint8_t *source, uint8_t *const *planes);
void join_planes(const struct work *work, const uint8_t *const *planes, uint8_t *target);
void cast_values(const uint8_t *source, size_t count, uint8_t *target);

/* Adds to 256 counters for each plane; which elements are looked at is said by the numpy twin. */
void count_sample(const struct work *work, const uint8_t *source, uint32_t *counts);

/* Of the sampled words, how many equal the one before in the same of WORD_SLOTS slots. */
long count_repeats(const uint8_t *source, size_t length, uint64_t *slots);

/* The best loops that this CPU has. */
void choose_loops(void);

/* Those of a name; 0 if this CPU lacks them. */
int use_loops(const char *name);

#endif
