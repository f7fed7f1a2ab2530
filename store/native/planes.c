/*
 * The loops of the tensor codecs: split into byte planes and back, difference to a parent, cast, samples.
 *
 * store/codecs/planes_twin.py says in numpy what each function returns; this module only returns it sooner.
 * Every loop is compiled twice, for the baseline CPU and for AVX2; which one runs is decided when the module
 * is loaded. Buffers may lie at any address. The GIL is released while a loop runs, and nothing is kept
 * between calls, so any number of threads may be here at once.
 *
 * Source: store/FORMAT.md, "Encoded chunks" (elements, planes, difference).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "huffman.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "little-endian machines only; the numpy twin serves the others"
#endif

#define MAX_WIDTH 8
#define SAMPLE_RUN 256     /* elements looked at ... */
#define SAMPLE_STRIDE 8192 /* ... of so many */
#define WORD_STRIDE 256    /* bytes from one sampled word to the next */
#define WORD_SLOTS 2048

/* Parameters of an element; the values are those of the numpy twin. */
#define ROTATED 1
#define SIGN_MAGNITUDE 2

typedef uint16_t any16 __attribute__((aligned(1), may_alias));
typedef uint32_t any32 __attribute__((aligned(1), may_alias));
typedef uint64_t any64 __attribute__((aligned(1), may_alias));
typedef uint8_t any8 __attribute__((may_alias));

/* Which value stands for an element: itself, rotated left by one bit, or its difference to the parent's. */
enum transform { PLAIN, ROTATE, DIFFERENCE, DIFFERENCE_OF_SIGN_MAGNITUDE, TRANSFORMS };

static enum transform transform_of(int parameters, int has_parent)
{
    if (has_parent)
        return parameters & SIGN_MAGNITUDE ? DIFFERENCE_OF_SIGN_MAGNITUDE : DIFFERENCE;
    return parameters & ROTATED ? ROTATE : PLAIN;
}

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

static int log2_of_width(Py_ssize_t width)
{
    for (int power = 0; power < 4; power++)
        if (width == 1 << power)
            return power;
    PyErr_Format(PyExc_ValueError, "an element of %zd bytes", width);
    return -1;
}

/* Fill `view` from a buffer or None; 1 if there is one, 0 for None, -1 with an exception set. */
static int optional_buffer(PyObject *object, Py_buffer *view)
{
    if (object == Py_None)
        return 0;
    return PyObject_GetBuffer(object, view, PyBUF_SIMPLE) < 0 ? -1 : 1;
}

struct pair {
    Py_buffer source, parent;
    int has_parent;
    Py_ssize_t width, count;
    int power;
    enum transform how;
};

static void release_pair(struct pair *pair)
{
    if (pair->source.obj)
        PyBuffer_Release(&pair->source);
    if (pair->has_parent > 0)
        PyBuffer_Release(&pair->parent);
}

/* The arguments of `split` and `sample`: source, parent or None, width, parameters. */
static int take_pair(PyObject *args, const char *format, struct pair *pair)
{
    PyObject *parent;
    int parameters;
    memset(pair, 0, sizeof(*pair));
    if (!PyArg_ParseTuple(args, format, &pair->source, &parent, &pair->width, &parameters))
        return -1;
    pair->power = log2_of_width(pair->width);
    if (pair->power >= 0)
        pair->has_parent = optional_buffer(parent, &pair->parent);
    if (pair->power < 0 || pair->has_parent < 0) {
        release_pair(pair);
        return -1;
    }
    if (pair->has_parent && pair->parent.len != pair->source.len) {
        PyErr_SetString(PyExc_ValueError, "a parent of another length");
        release_pair(pair);
        return -1;
    }
    pair->count = pair->source.len >> pair->power;
    pair->how = transform_of(parameters, pair->has_parent);
    return 0;
}

static PyObject *split(PyObject *self, PyObject *args)
{
    struct pair pair;
    (void)self;
    if (take_pair(args, "y*Oni:split", &pair) < 0)
        return NULL;
    PyObject *result = PyBytes_FromStringAndSize(NULL, pair.count * pair.width);
    if (result) {
        uint8_t *planes[MAX_WIDTH];
        for (Py_ssize_t plane = 0; plane < pair.width; plane++)
            planes[plane] = (uint8_t *)PyBytes_AS_STRING(result) + plane * pair.count;
        Py_BEGIN_ALLOW_THREADS
        chosen->split[pair.power][pair.how](
            pair.source.buf, pair.has_parent ? pair.parent.buf : NULL, (size_t)pair.count, planes);
        Py_END_ALLOW_THREADS
    }
    release_pair(&pair);
    return result;
}

/* How often each byte value occurs in each plane, of the first SAMPLE_RUN of every SAMPLE_STRIDE elements. */
static void count_sample(const struct pair *pair, uint32_t *counts)
{
    uint8_t room[MAX_WIDTH][SAMPLE_RUN], *planes[MAX_WIDTH];
    const uint8_t *source = pair->source.buf, *parent = pair->has_parent ? pair->parent.buf : NULL;
    for (int plane = 0; plane < MAX_WIDTH; plane++)
        planes[plane] = room[plane];
    for (Py_ssize_t at = 0; at < pair->count; at += SAMPLE_STRIDE) {
        size_t n = (size_t)(pair->count - at < SAMPLE_RUN ? pair->count - at : SAMPLE_RUN);
        Py_ssize_t start = at << pair->power;
        chosen->split[pair->power][pair->how](source + start, parent ? parent + start : NULL, n, planes);
        for (Py_ssize_t plane = 0; plane < pair->width; plane++)
            for (size_t i = 0; i < n; i++)
                counts[256 * plane + room[plane][i]]++;
    }
}

static PyObject *sample(PyObject *self, PyObject *args)
{
    struct pair pair;
    (void)self;
    if (take_pair(args, "y*Oni:sample", &pair) < 0)
        return NULL;
    Py_ssize_t length = pair.width * 256 * (Py_ssize_t)sizeof(uint32_t);
    PyObject *result = PyBytes_FromStringAndSize(NULL, length);
    if (result) {
        uint32_t *counts = (uint32_t *)PyBytes_AS_STRING(result);
        Py_BEGIN_ALLOW_THREADS
        memset(counts, 0, (size_t)length);
        count_sample(&pair, counts);
        Py_END_ALLOW_THREADS
    }
    release_pair(&pair);
    return result;
}

static PyObject *join(PyObject *self, PyObject *args)
{
    PyObject *sequence, *parent_object, *planes = NULL, *result = NULL;
    Py_buffer views[MAX_WIDTH], parent, tail;
    Py_ssize_t width, length;
    int parameters, has_parent = 0, taken = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOniy*:join", &sequence, &parent_object, &width, &parameters, &tail))
        return NULL;
    int power = log2_of_width(width);
    if (power < 0 || !(planes = PySequence_Fast(sequence, "planes are a sequence")))
        goto done;
    if (PySequence_Fast_GET_SIZE(planes) != width) {
        PyErr_SetString(PyExc_ValueError, "another number of planes");
        goto done;
    }
    for (; taken < width; taken++)
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(planes, taken), &views[taken], PyBUF_SIMPLE) < 0)
            goto done;
    for (int plane = 1; plane < width; plane++)
        if (views[plane].len != views[0].len) {
            PyErr_SetString(PyExc_ValueError, "planes of different lengths");
            goto done;
        }
    length = (views[0].len << power) + tail.len;
    has_parent = optional_buffer(parent_object, &parent);
    if (has_parent < 0)
        goto done;
    if (has_parent && parent.len != length) {
        PyErr_SetString(PyExc_ValueError, "a parent of another length");
        goto done;
    }
    result = PyBytes_FromStringAndSize(NULL, length);
    if (result) {
        const uint8_t *starts[MAX_WIDTH];
        char *target = PyBytes_AS_STRING(result);
        for (int plane = 0; plane < width; plane++)
            starts[plane] = views[plane].buf;
        Py_BEGIN_ALLOW_THREADS
        chosen->join[power][transform_of(parameters, has_parent)](
            starts, has_parent ? parent.buf : NULL, (size_t)views[0].len, target);
        memcpy(target + (length - tail.len), tail.buf, (size_t)tail.len);
        Py_END_ALLOW_THREADS
    }
done:
    while (taken)
        PyBuffer_Release(&views[--taken]);
    if (has_parent > 0)
        PyBuffer_Release(&parent);
    Py_XDECREF(planes);
    PyBuffer_Release(&tail);
    return result;
}

static PyObject *cast(PyObject *self, PyObject *args)
{
    Py_buffer source;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*:cast", &source))
        return NULL;
    PyObject *result = PyBytes_FromStringAndSize(NULL, source.len / 4 * 2);
    if (result) {
        Py_BEGIN_ALLOW_THREADS
        chosen->cast(source.buf, (size_t)(source.len / 4), PyBytes_AS_STRING(result));
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&source);
    return result;
}

/* Of the words at every WORD_STRIDE bytes: how many equal the one before in the same slot. */
static long count_repeats(const uint8_t *source, Py_ssize_t length, uint64_t *slots)
{
    long repeats = 0;
    /* No word has the slot of the number that stands in it before there was one, 0 being in slot 0. */
    memset(slots, 0, WORD_SLOTS * sizeof(*slots));
    slots[0] = 1;
    for (Py_ssize_t at = 0; at + 8 <= length; at += WORD_STRIDE) {
        uint64_t word = *(const any64 *)(source + at);
        uint64_t *slot = &slots[(word * 0x9e3779b97f4a7c15u) >> 53];
        repeats += *slot == word;
        *slot = word;
    }
    return repeats;
}

static PyObject *repeats(PyObject *self, PyObject *args)
{
    Py_buffer source;
    long found = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*:repeats", &source))
        return NULL;
    uint64_t *slots = PyMem_Malloc(WORD_SLOTS * sizeof(*slots));
    if (slots) {
        Py_BEGIN_ALLOW_THREADS
        found = count_repeats(source.buf, source.len, slots);
        Py_END_ALLOW_THREADS
        PyMem_Free(slots);
    }
    PyBuffer_Release(&source);
    return slots ? PyLong_FromLong(found) : PyErr_NoMemory();
}

static PyObject *huffman(PyObject *self, PyObject *args)
{
    Py_buffer source;
    size_t length = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*:huffman", &source))
        return NULL;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)huffman_room((size_t)source.len));
    if (result) {
        Py_BEGIN_ALLOW_THREADS
        length = huffman_frame(source.buf, (size_t)source.len, (uint8_t *)PyBytes_AS_STRING(result));
        Py_END_ALLOW_THREADS
        _PyBytes_Resize(&result, (Py_ssize_t)length);
    }
    PyBuffer_Release(&source);
    return result;
}

static PyObject *use_loops(PyObject *self, PyObject *args)
{
    const char *name;
    (void)self;
    if (!PyArg_ParseTuple(args, "s:use_loops", &name))
        return NULL;
    if (!strcmp(name, loops_base.name)) {
        chosen = &loops_base;
        Py_RETURN_TRUE;
    }
#ifdef HAS_AVX2_LOOPS
    if (!strcmp(name, loops_avx2.name) && __builtin_cpu_supports("avx2")) {
        chosen = &loops_avx2;
        Py_RETURN_TRUE;
    }
#endif
    Py_RETURN_FALSE;
}

static PyMethodDef methods[] = {
    {"split", split, METH_VARARGS, "split(source, parent, width, parameters): the planes, one behind the other."},
    {"join", join, METH_VARARGS, "join(planes, parent, width, parameters, tail): the source again."},
    {"cast", cast, METH_VARARGS, "cast(source): float32 as bfloat16."},
    {"sample", sample, METH_VARARGS, "sample(source, parent, width, parameters): counts of byte values."},
    {"repeats", repeats, METH_VARARGS, "repeats(source): how many sampled words occurred before."},
    {"huffman", huffman, METH_VARARGS, "huffman(source): a zstd frame, or nothing if zstd does better."},
    {"use_loops", use_loops, METH_VARARGS, "use_loops(name): for tests; whether this CPU has them."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_planes", "Loops of the tensor codecs.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__planes(void)
{
#ifdef HAS_AVX2_LOOPS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        chosen = &loops_avx2;
#endif
    return PyModule_Create(&module);
}
