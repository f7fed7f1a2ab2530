/*
 * The loops of the tensor codecs: split into byte planes and back, difference to a parent, cast, samples.
 *
 * store/codecs/planes_twin.py says in numpy what each does; this only does it sooner. Every loop is compiled
 * twice, for the baseline CPU and for AVX2; which one runs is decided when the module is loaded. Buffers may lie
 * at any address.
 *
 * Source: store/FORMAT.md, "Encoded chunks" (elements, planes, difference).
 */
#include "loops.h"

#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "little-endian machines only; the numpy twin serves the others"
#endif

#define SAMPLE_RUN 256     /* elements looked at ... */
#define SAMPLE_STRIDE 8192 /* ... of so many */
#define WORD_STRIDE 256    /* bytes from one sampled word to the next */

typedef uint16_t any16 __attribute__((aligned(1), may_alias));
typedef uint32_t any32 __attribute__((aligned(1), may_alias));
typedef uint64_t any64 __attribute__((aligned(1), may_alias));
typedef uint8_t any8 __attribute__((may_alias));

/*
 * `ordered` maps the bits of a float to an integer of the same order, and back; `forward` and `backward` are
 * each other's inverse for every bit pattern, NaN included.
 */
#define DEFINE_ELEMENT(T, S, BITS)                                                                         \
    static inline __attribute__((always_inline)) T ordered##BITS(T x)                                      \
    {                                                                                                      \
        return (T)(x ^ (T)((T)((S)x >> (BITS - 1)) & (T)((T)~(T)0 >> 1)));                                 \
    }                                                                                                      \
    static inline __attribute__((always_inline)) T forward##BITS(T x, T p, enum transform how)             \
    {                                                                                                      \
        T d;                                                                                               \
        switch (how) {                                                                                     \
        case ROTATE:                                                                                       \
            return (T)((T)(x << 1) | (T)(x >> (BITS - 1)));                                                \
        case DIFFERENCE:                                                                                   \
            d = (T)(x - p);                                                                                \
            return (T)((T)(d << 1) ^ (T)((S)d >> (BITS - 1)));                                             \
        case DIFFERENCE_OF_SIGN_MAGNITUDE:                                                                 \
            d = (T)(ordered##BITS(x) - ordered##BITS(p));                                                  \
            return (T)((T)(d << 1) ^ (T)((S)d >> (BITS - 1)));                                             \
        default:                                                                                           \
            return x;                                                                                      \
        }                                                                                                  \
    }                                                                                                      \
    static inline __attribute__((always_inline)) T backward##BITS(T z, T p, enum transform how)            \
    {                                                                                                      \
        T d;                                                                                               \
        switch (how) {                                                                                     \
        case ROTATE:                                                                                       \
            return (T)((T)(z >> 1) | (T)(z << (BITS - 1)));                                                \
        case DIFFERENCE:                                                                                   \
            d = (T)((T)(z >> 1) ^ (T)(0 - (T)(z & 1)));                                                    \
            return (T)(d + p);                                                                             \
        case DIFFERENCE_OF_SIGN_MAGNITUDE:                                                                 \
            d = (T)((T)(z >> 1) ^ (T)(0 - (T)(z & 1)));                                                    \
            return ordered##BITS((T)(d + ordered##BITS(p)));                                               \
        default:                                                                                           \
            return z;                                                                                      \
        }                                                                                                  \
    }

DEFINE_ELEMENT(uint8_t, int8_t, 8)
DEFINE_ELEMENT(uint16_t, int16_t, 16)
DEFINE_ELEMENT(uint32_t, int32_t, 32)
DEFINE_ELEMENT(uint64_t, int64_t, 64)

enum transform transform_of(int parameters, int has_parent)
{
    if (has_parent)
        return parameters & SIGN_MAGNITUDE ? DIFFERENCE_OF_SIGN_MAGNITUDE : DIFFERENCE;
    return parameters & ROTATED ? ROTATE : PLAIN;
}

typedef void (*split_loop)(const void *source, const void *parent, size_t count, uint8_t *const *planes);
typedef void (*join_loop)(const uint8_t *const *planes, const void *parent, size_t count, void *target);
typedef void (*cast_loop)(const void *source, size_t count, void *target);

#define BYTE(PLANES, I, PLANE, T) ((T)PLANES[PLANE][I] << (8 * PLANE))
#define JOINED8(P, I) P[0][I]
#define JOINED16(P, I) (BYTE(P, I, 0, uint16_t) | BYTE(P, I, 1, uint16_t))
#define JOINED32(P, I)                                                                                     \
    (BYTE(P, I, 0, uint32_t) | BYTE(P, I, 1, uint32_t) | BYTE(P, I, 2, uint32_t) | BYTE(P, I, 3, uint32_t))
#define HALF64(P, I, A, B, C, D)                                                                           \
    (BYTE(P, I, A, uint64_t) | BYTE(P, I, B, uint64_t) | BYTE(P, I, C, uint64_t) | BYTE(P, I, D, uint64_t))
#define JOINED64(P, I) (HALF64(P, I, 0, 1, 2, 3) | HALF64(P, I, 4, 5, 6, 7))

/*
 * The loops over blocks of elements: the block's values first, then one plane after the other from them, which
 * compilers turn into packs and shuffles (gcc 12, clang 14 looked at).
 */
#define BLOCK 1024

#define DEFINE_LOOPS(T, BITS, HOW, SUFFIX, TARGET)                                                         \
    TARGET static void split##BITS##_##HOW##SUFFIX(                                                        \
        const void *source, const void *parent, size_t count, uint8_t *const *planes)                      \
    {                                                                                                      \
        const any##BITS *x = source, *p = parent;                                                          \
        T z[BLOCK] __attribute__((aligned(64)));                                                           \
        for (size_t at = 0; at < count; at += BLOCK) {                                                     \
            size_t n = count - at < BLOCK ? count - at : BLOCK;                                            \
            for (size_t i = 0; i < n; i++)                                                                 \
                z[i] = forward##BITS(x[at + i], p ? p[at + i] : 0, HOW);                                   \
            for (int plane = 0; plane < BITS / 8; plane++) {                                               \
                uint8_t *restrict out = planes[plane] + at;                                                \
                for (size_t i = 0; i < n; i++)                                                             \
                    out[i] = (uint8_t)(z[i] >> (8 * plane));                                               \
            }                                                                                              \
        }                                                                                                  \
    }                                                                                                      \
    TARGET static void join##BITS##_##HOW##SUFFIX(                                                         \
        const uint8_t *const *planes, const void *parent, size_t count, void *target)                      \
    {                                                                                                      \
        any##BITS *x = target;                                                                             \
        const any##BITS *p = parent;                                                                       \
        T z[BLOCK] __attribute__((aligned(64)));                                                           \
        for (size_t at = 0; at < count; at += BLOCK) {                                                     \
            size_t n = count - at < BLOCK ? count - at : BLOCK;                                            \
            for (size_t i = 0; i < n; i++)                                                                 \
                z[i] = (T)JOINED##BITS(planes, at + i);                                                    \
            for (size_t i = 0; i < n; i++)                                                                 \
                x[at + i] = backward##BITS(z[i], p ? p[at + i] : 0, HOW);                                  \
        }                                                                                                  \
    }

#define DEFINE_TRANSFORMS(T, BITS, SUFFIX, TARGET)                                                         \
    DEFINE_LOOPS(T, BITS, PLAIN, SUFFIX, TARGET)                                                           \
    DEFINE_LOOPS(T, BITS, ROTATE, SUFFIX, TARGET)                                                          \
    DEFINE_LOOPS(T, BITS, DIFFERENCE, SUFFIX, TARGET)                                                      \
    DEFINE_LOOPS(T, BITS, DIFFERENCE_OF_SIGN_MAGNITUDE, SUFFIX, TARGET)

/* bfloat16 of a float32: nearest, ties to even; every NaN becomes 0x7fc0. */
#define DEFINE_CAST(SUFFIX, TARGET)                                                                        \
    TARGET static void cast##SUFFIX(const void *source, size_t count, void *target)                        \
    {                                                                                                      \
        const any32 *x = source;                                                                           \
        any16 *out = target;                                                                               \
        for (size_t i = 0; i < count; i++) {                                                               \
            uint32_t u = x[i];                                                                             \
            uint32_t nearest = (u + 0x7fff + ((u >> 16) & 1)) >> 16;                                       \
            out[i] = (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : nearest);                         \
        }                                                                                                  \
    }

#define DEFINE_ALL(SUFFIX, TARGET)                                                                         \
    DEFINE_TRANSFORMS(uint8_t, 8, SUFFIX, TARGET)                                                          \
    DEFINE_TRANSFORMS(uint16_t, 16, SUFFIX, TARGET)                                                        \
    DEFINE_TRANSFORMS(uint32_t, 32, SUFFIX, TARGET)                                                        \
    DEFINE_TRANSFORMS(uint64_t, 64, SUFFIX, TARGET)                                                        \
    DEFINE_CAST(SUFFIX, TARGET)

struct loops {
    const char *name;
    split_loop split[4][TRANSFORMS];
    join_loop join[4][TRANSFORMS];
    cast_loop cast;
};

#define ROW(VERB, BITS, SUFFIX)                                                                            \
    {VERB##BITS##_PLAIN##SUFFIX, VERB##BITS##_ROTATE##SUFFIX, VERB##BITS##_DIFFERENCE##SUFFIX,             \
     VERB##BITS##_DIFFERENCE_OF_SIGN_MAGNITUDE##SUFFIX}
#define TABLE(VERB, SUFFIX)                                                                                \
    {ROW(VERB, 8, SUFFIX), ROW(VERB, 16, SUFFIX), ROW(VERB, 32, SUFFIX), ROW(VERB, 64, SUFFIX)}
#define DEFINE_TABLE(NAME, SUFFIX)                                                                         \
    static const struct loops loops##SUFFIX = {NAME, TABLE(split, SUFFIX), TABLE(join, SUFFIX), cast##SUFFIX};

DEFINE_ALL(_base, )
DEFINE_TABLE("baseline", _base)

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2_LOOPS
DEFINE_ALL(_avx2, __attribute__((target("avx2"))))
DEFINE_TABLE("avx2", _avx2)
#endif

static const struct loops *chosen = &loops_base;

void split_planes(const struct work *work, const uint8_t *source, uint8_t *const *planes)
{
    chosen->split[work->power][work->how](source, work->parent, work->count, planes);
}

void join_planes(const struct work *work, const uint8_t *const *planes, uint8_t *target)
{
    chosen->join[work->power][work->how](planes, work->parent, work->count, target);
}

void cast_values(const uint8_t *source, size_t count, uint8_t *target)
{
    chosen->cast(source, count, target);
}

void count_sample(const struct work *work, const uint8_t *source, uint32_t *counts)
{
    uint8_t room[MAX_WIDTH][SAMPLE_RUN], *planes[MAX_WIDTH];
    for (int plane = 0; plane < MAX_WIDTH; plane++)
        planes[plane] = room[plane];
    for (size_t at = 0; at < work->count; at += SAMPLE_STRIDE) {
        struct work run = *work;
        size_t start = at << work->power;
        run.count = work->count - at < SAMPLE_RUN ? work->count - at : SAMPLE_RUN;
        run.parent = work->parent ? work->parent + start : NULL;
        split_planes(&run, source + start, planes);
        for (int plane = 0; plane < 1 << work->power; plane++)
            for (size_t i = 0; i < run.count; i++)
                counts[256 * plane + room[plane][i]]++;
    }
}

long count_repeats(const uint8_t *source, size_t length, uint64_t *slots)
{
    long repeats = 0;
    /* No word has the slot of the number that stands in it before there was one, 0 being in slot 0. */
    memset(slots, 0, WORD_SLOTS * sizeof(*slots));
    slots[0] = 1;
    for (size_t at = 0; at + 8 <= length; at += WORD_STRIDE) {
        uint64_t word = *(const any64 *)(source + at);
        uint64_t *slot = &slots[(word * 0x9e3779b97f4a7c15u) >> 53];
        repeats += *slot == word;
        *slot = word;
    }
    return repeats;
}

int use_loops(const char *name)
{
    if (!strcmp(name, loops_base.name)) {
        chosen = &loops_base;
        return 1;
    }
#ifdef HAS_AVX2_LOOPS
    if (!strcmp(name, loops_avx2.name) && __builtin_cpu_supports("avx2")) {
        chosen = &loops_avx2;
        return 1;
    }
#endif
    return 0;
}

void choose_loops(void)
{
#ifdef HAS_AVX2_LOOPS
    __builtin_cpu_init();
    use_loops(loops_avx2.name);
#endif
}
