/*
 * The way from Python to context.c. The GIL is released meanwhile, and nothing is kept between calls.
 *
 * store/codecs/context_twin.py says what each function returns.
 */
#include "context_methods.h"

#include <string.h>

#include "context.h"

#define COUNTS_BYTES (EXPONENTS * SYMBOLS * sizeof(uint32_t))
#define ROW_BYTES (SYMBOLS * sizeof(uint16_t))

/* -1 with an exception set if there are no such elements, or the parent is not `length` bytes long. */
static int fill_pair(struct pair *pair, const Py_buffer *parent, Py_ssize_t length)
{
    pair->parent = parent->buf;
    if ((pair->width != 2 && pair->width != 4) || pair->fraction_bits < 8 * pair->width - 9
        || pair->fraction_bits > 8 * pair->width - 2) {
        PyErr_SetString(PyExc_ValueError, "not a float of 2 or 4 bytes whose exponent has 1 to 8 bits");
        return -1;
    }
    if (parent->len != length) {
        PyErr_SetString(PyExc_ValueError, "a parent of another length");
        return -1;
    }
    pair->count = (size_t)(length / pair->width);
    return 0;
}

PyObject *context_counts(PyObject *self, PyObject *args)
{
    Py_buffer source, parent;
    struct pair pair;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*ii:context_counts", &source, &parent, &pair.width, &pair.fraction_bits))
        return NULL;
    pair.source = source.buf;
    if (fill_pair(&pair, &parent, source.len) == 0)
        result = PyBytes_FromStringAndSize(NULL, COUNTS_BYTES);
    if (result) {
        uint32_t(*counts)[SYMBOLS] = (void *)PyBytes_AS_STRING(result);
        Py_BEGIN_ALLOW_THREADS
        memset(counts, 0, COUNTS_BYTES);
        count_symbols(&pair, counts);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&parent);
    PyBuffer_Release(&source);
    return result;
}

/* Copies the frequencies of each context; -1 with an exception set if they do not fit together. */
static int take_frequencies(
    const Py_buffer *context_of, const Py_buffer *rows, uint16_t (*frequencies)[SYMBOLS])
{
    size_t contexts = (size_t)rows->len / ROW_BYTES;
    int is_right = context_of->len == EXPONENTS && (size_t)rows->len == contexts * ROW_BYTES
        && contexts <= MOST_CONTEXTS;
    for (size_t at = 0; is_right && at < EXPONENTS; at++)
        is_right = ((const uint8_t *)context_of->buf)[at] < contexts;
    if (is_right)
        memcpy(frequencies, rows->buf, (size_t)rows->len);
    for (size_t context = 0; is_right && context < contexts; context++) {
        uint32_t sum = 0;
        for (size_t symbol = 0; symbol < SYMBOLS; symbol++)
            sum += frequencies[context][symbol];
        is_right = sum == SCALE;
    }
    if (is_right)
        return 0;
    PyErr_SetString(PyExc_ValueError, "not contexts with frequencies");
    return -1;
}

static PyObject *packed(const struct pair *pair, const uint8_t *context_of, const uint16_t (*frequencies)[SYMBOLS])
{
    size_t length;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)context_room(pair->count));
    if (!result)
        return NULL;
    uint8_t *target = (uint8_t *)PyBytes_AS_STRING(result);
    Py_BEGIN_ALLOW_THREADS
    length = pack_context(pair, context_of, frequencies, target);
    Py_END_ALLOW_THREADS
    if (!length) {
        Py_DECREF(result);
        return PyErr_Format(PyExc_ValueError, "a symbol has no frequency");
    }
    _PyBytes_Resize(&result, (Py_ssize_t)length);
    return result;
}

PyObject *context_pack(PyObject *self, PyObject *args)
{
    Py_buffer source, parent, context_of, rows;
    uint16_t frequencies[MOST_CONTEXTS][SYMBOLS];
    struct pair pair;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(
            args, "y*y*iiy*y*:context_pack", &source, &parent, &pair.width, &pair.fraction_bits, &context_of, &rows))
        return NULL;
    pair.source = source.buf;
    memset(frequencies, 0, sizeof(frequencies));
    if (fill_pair(&pair, &parent, source.len) == 0 && take_frequencies(&context_of, &rows, frequencies) == 0)
        result = packed(&pair, context_of.buf, (const uint16_t(*)[SYMBOLS])frequencies);
    PyBuffer_Release(&rows);
    PyBuffer_Release(&context_of);
    PyBuffer_Release(&parent);
    PyBuffer_Release(&source);
    return result;
}

PyObject *context_unpack(PyObject *self, PyObject *args)
{
    Py_buffer body, parent;
    struct pair pair = {.source = NULL};
    PyObject *result = NULL;
    int is_done = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*ii:context_unpack", &body, &parent, &pair.width, &pair.fraction_bits))
        return NULL;
    if (fill_pair(&pair, &parent, parent.len) == 0)
        result = PyBytes_FromStringAndSize(NULL, parent.len);
    if (result) {
        uint8_t *target = (uint8_t *)PyBytes_AS_STRING(result);
        Py_BEGIN_ALLOW_THREADS
        is_done = unpack_context(&pair, body.buf, (size_t)body.len, target, (size_t)parent.len);
        Py_END_ALLOW_THREADS
        if (!is_done) {
            Py_DECREF(result);
            result = Py_NewRef(Py_None);
        }
    }
    PyBuffer_Release(&parent);
    PyBuffer_Release(&body);
    return result;
}
