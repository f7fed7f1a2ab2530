/*
 * The Python module ckptfs.store._planes: the loops of the tensor codecs.
 *
 * store/codecs/planes_twin.py says in numpy what each function returns. The GIL is released while a loop runs,
 * and nothing is kept between calls, so any number of threads may be here at once. No buffer is kept either.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "block.h"
#include "context_methods.h"
#include "huffman.h"
#include "loops.h"
#include "unpacker.h"

int power_of_width(Py_ssize_t width)
{
    for (int power = 0; power < 4; power++)
        if (width == 1 << power)
            return power;
    PyErr_Format(PyExc_ValueError, "an element of %zd bytes", width);
    return -1;
}

/* A buffer that may be None; its `obj` is NULL then. -1 with an exception set. */
static int optional_buffer(PyObject *object, Py_buffer *view)
{
    view->obj = NULL;
    view->buf = NULL;
    return object == Py_None ? 0 : PyObject_GetBuffer(object, view, PyBUF_SIMPLE);
}

/* Fills in what `work` says of a parent; -1 with an exception set if it is not `length` bytes long. */
static int use_parent(struct work *work, const Py_buffer *parent, Py_ssize_t length, int parameters)
{
    work->parent = parent->buf;
    work->how = transform_of(parameters, parent->obj != NULL);
    if (!parent->obj || parent->len == length)
        return 0;
    PyErr_SetString(PyExc_ValueError, "a parent of another length");
    return -1;
}

/* The arguments of `split` and `sample`. All buffers are released by the caller if 0 is returned. */
static int take_pair(PyObject *args, const char *format, Py_buffer *source, Py_buffer *parent, struct work *work)
{
    PyObject *object;
    Py_ssize_t width;
    int parameters;
    if (!PyArg_ParseTuple(args, format, source, &object, &width, &parameters))
        return -1;
    work->power = power_of_width(width);
    if (work->power >= 0 && optional_buffer(object, parent) == 0) {
        work->count = (size_t)source->len >> work->power;
        if (use_parent(work, parent, source->len, parameters) == 0)
            return 0;
        PyBuffer_Release(parent);
    }
    PyBuffer_Release(source);
    return -1;
}

static PyObject *split(PyObject *self, PyObject *args)
{
    Py_buffer source, parent;
    struct work work;
    (void)self;
    if (take_pair(args, "y*Oni:split", &source, &parent, &work) < 0)
        return NULL;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(work.count << work.power));
    if (result) {
        uint8_t *planes[MAX_WIDTH];
        for (int plane = 0; plane < 1 << work.power; plane++)
            planes[plane] = (uint8_t *)PyBytes_AS_STRING(result) + (size_t)plane * work.count;
        Py_BEGIN_ALLOW_THREADS
        split_planes(&work, source.buf, planes);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&parent);
    PyBuffer_Release(&source);
    return result;
}

static PyObject *sample(PyObject *self, PyObject *args)
{
    Py_buffer source, parent;
    struct work work;
    (void)self;
    if (take_pair(args, "y*Oni:sample", &source, &parent, &work) < 0)
        return NULL;
    size_t length = (256 * sizeof(uint32_t)) << work.power;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length);
    if (result) {
        uint32_t *counts = (uint32_t *)PyBytes_AS_STRING(result);
        Py_BEGIN_ALLOW_THREADS
        memset(counts, 0, length);
        count_sample(&work, source.buf, counts);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&parent);
    PyBuffer_Release(&source);
    return result;
}

/* Takes the buffers of `width` planes of one length; how many were taken, all if there is no exception. */
static Py_ssize_t take_planes(PyObject *planes, Py_ssize_t width, Py_buffer *views)
{
    Py_ssize_t taken = 0;
    if (PySequence_Fast_GET_SIZE(planes) != width) {
        PyErr_SetString(PyExc_ValueError, "another number of planes");
        return 0;
    }
    while (taken < width) {
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(planes, taken), &views[taken], PyBUF_SIMPLE) < 0)
            return taken;
        if (views[taken++].len != views[0].len) {
            PyErr_SetString(PyExc_ValueError, "planes of different lengths");
            return taken;
        }
    }
    return taken;
}

static PyObject *joined(
    const Py_buffer *planes, struct work *work, const Py_buffer *parent, int parameters, const Py_buffer *tail)
{
    const uint8_t *starts[MAX_WIDTH];
    work->count = (size_t)planes[0].len;
    size_t whole = work->count << work->power;
    Py_ssize_t length = (Py_ssize_t)whole + tail->len;
    PyObject *result = NULL;
    if (use_parent(work, parent, length, parameters) == 0)
        result = PyBytes_FromStringAndSize(NULL, length);
    if (result) {
        uint8_t *target = (uint8_t *)PyBytes_AS_STRING(result);
        for (int plane = 0; plane < 1 << work->power; plane++)
            starts[plane] = planes[plane].buf;
        Py_BEGIN_ALLOW_THREADS
        join_planes(work, starts, target);
        memcpy(target + whole, tail->buf, (size_t)tail->len);
        Py_END_ALLOW_THREADS
    }
    return result;
}

static PyObject *join(PyObject *self, PyObject *args)
{
    PyObject *object, *parent_object, *planes = NULL, *result = NULL;
    Py_buffer views[MAX_WIDTH], parent = {0}, tail;
    Py_ssize_t width, taken = 0;
    struct work work;
    int parameters;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOniy*:join", &object, &parent_object, &width, &parameters, &tail))
        return NULL;
    work.power = power_of_width(width);
    if (work.power >= 0)
        planes = PySequence_Fast(object, "planes are a sequence");
    if (planes)
        taken = take_planes(planes, width, views);
    if (taken && !PyErr_Occurred() && optional_buffer(parent_object, &parent) == 0)
        result = joined(views, &work, &parent, parameters, &tail);
    while (taken)
        PyBuffer_Release(&views[--taken]);
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
        cast_values(source.buf, (size_t)(source.len / 4), (uint8_t *)PyBytes_AS_STRING(result));
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&source);
    return result;
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
        found = count_repeats(source.buf, (size_t)source.len, slots);
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

static PyObject *use(PyObject *self, PyObject *args)
{
    const char *name;
    (void)self;
    if (!PyArg_ParseTuple(args, "s:use_loops", &name))
        return NULL;
    return PyBool_FromLong(use_loops(name));
}

static PyMethodDef methods[] = {
    {"split", split, METH_VARARGS, "split(source, parent, width, parameters): the planes, one behind the other."},
    {"join", join, METH_VARARGS, "join(planes, parent, width, parameters, tail): the source again."},
    {"cast", cast, METH_VARARGS, "cast(source): float32 as bfloat16."},
    {"sample", sample, METH_VARARGS, "sample(source, parent, width, parameters): counts of byte values."},
    {"repeats", repeats, METH_VARARGS, "repeats(source): how many sampled words occurred before."},
    {"huffman", huffman, METH_VARARGS, "huffman(source): a zstd frame, or nothing if zstd does better."},
    {"context_counts", context_counts, METH_VARARGS, "context_counts(source, parent, width, fraction_bits): u32."},
    {"context_pack", context_pack, METH_VARARGS,
     "context_pack(source, parent, width, fraction_bits, context_of, frequencies): what stands behind the tables."},
    {"context_unpack", context_unpack, METH_VARARGS,
     "context_unpack(body, parent, width, fraction_bits): the source again, or None."},
    {"use_loops", use, METH_VARARGS, "use_loops(name): for tests; whether this CPU has them."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_planes", "Loops of the tensor codecs.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__planes(void)
{
    choose_loops();
    PyObject *made = PyModule_Create(&module);
    if (made && (add_unpacker(made) < 0 || add_block(made) < 0))
        Py_CLEAR(made);
    return made;
}
