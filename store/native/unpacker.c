/*
 * The Python type Unpacker: the memory that a thread unpacks chunks in (unpack.c), and the way there.
 *
 * The GIL is released while a chunk is unpacked. An object is used by one thread at a time; a second one is told so.
 */
#include "unpacker.h"

#include "unpack.h"
#include "zstd_frame.h"

#define MOST_CHUNKS 16 /* more than a chain may have */

typedef struct {
    PyObject_HEAD struct room room;
    int is_used;
} Unpacker;

/* What a call was given. `taken` buffers of `views` are to be released. */
struct arguments {
    struct packed chunks[MOST_CHUNKS];
    Py_buffer views[MOST_CHUNKS];
    Py_ssize_t count, taken, length;
    Py_buffer parent;
};

static PyObject *new_unpacker(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    if (!PyArg_ParseTuple(args, ":Unpacker") || (keywords && PyDict_GET_SIZE(keywords)))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "Unpacker takes no arguments");
    Unpacker *self = (Unpacker *)type->tp_alloc(type, 0);
    if (self && !open_room(&self->room)) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void delete_unpacker(PyObject *object)
{
    close_room(&((Unpacker *)object)->room);
    Py_TYPE(object)->tp_free(object);
}

static int take_chunk(struct arguments *taken, PyObject *object)
{
    struct packed *chunk = &taken->chunks[taken->taken];
    Py_buffer *view = &taken->views[taken->taken];
    Py_ssize_t width;
    if (!PyTuple_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "a chunk is a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(object, "y*ni;a chunk is its body, a width and parameters", view, &width, &chunk->parameters))
        return -1;
    taken->taken++;
    chunk->body = view->buf;
    chunk->size = (size_t)view->len;
    chunk->power = power_of_width(width);
    return chunk->power < 0 ? -1 : 0;
}

/* `parent` may be None. -1 with an exception set; what was taken is to be let go in any case. */
static int take(struct arguments *taken, PyObject *chunks, PyObject *parent)
{
    taken->count = PySequence_Fast_GET_SIZE(chunks);
    if (taken->count < 1 || taken->count > MOST_CHUNKS || taken->length < 1) {
        PyErr_SetString(PyExc_ValueError, "no chunk, or a chain that nobody makes");
        return -1;
    }
    for (Py_ssize_t at = 0; at < taken->count; at++)
        if (take_chunk(taken, PySequence_Fast_GET_ITEM(chunks, at)) < 0)
            return -1;
    if (parent == Py_None)
        return 0;
    if (PyObject_GetBuffer(parent, &taken->parent, PyBUF_SIMPLE) < 0)
        return -1;
    if (taken->parent.len == taken->length)
        return 0;
    PyErr_SetString(PyExc_ValueError, "a parent of another length");
    return -1;
}

static void let_go(struct arguments *taken)
{
    while (taken->taken)
        PyBuffer_Release(&taken->views[--taken->taken]);
    PyBuffer_Release(&taken->parent);
}

static PyObject *unpacked(Unpacker *self, const struct arguments *taken)
{
    int is_done;
    PyObject *result = PyBytes_FromStringAndSize(NULL, taken->length);
    if (!result)
        return NULL;
    uint8_t *target = (uint8_t *)PyBytes_AS_STRING(result);
    self->is_used = 1;
    Py_BEGIN_ALLOW_THREADS
    is_done = unpack(
        &self->room, taken->chunks, (size_t)taken->count, taken->parent.buf, target, (size_t)taken->length);
    Py_END_ALLOW_THREADS
    self->is_used = 0;
    if (is_done)
        return result;
    Py_DECREF(result);
    Py_RETURN_NONE;
}

static PyObject *unpack_chunks(PyObject *object, PyObject *args)
{
    Unpacker *self = (Unpacker *)object;
    struct arguments taken = {.taken = 0};
    PyObject *chunks, *parent, *result = NULL;
    if (!PyArg_ParseTuple(args, "OOn:unpack", &chunks, &parent, &taken.length))
        return NULL;
    if (self->is_used)
        return PyErr_Format(PyExc_RuntimeError, "another thread uses this unpacker");
    chunks = PySequence_Fast(chunks, "chunks are a sequence");
    if (!chunks)
        return NULL;
    if (take(&taken, chunks, parent) == 0)
        result = unpacked(self, &taken);
    let_go(&taken);
    Py_DECREF(chunks);
    return result;
}

static PyMethodDef methods[] = {
    {"unpack", unpack_chunks, METH_VARARGS, "unpack(chunks, parent, length): plain bytes, or None."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "ckptfs.store._planes.Unpacker",
    .tp_doc = "Unpacks chains of chunks.",
    .tp_basicsize = sizeof(Unpacker),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = new_unpacker,
    .tp_dealloc = delete_unpacker,
    .tp_methods = methods,
};

int add_unpacker(PyObject *module)
{
    if (!find_zstd())
        return PyModule_AddObjectRef(module, "Unpacker", Py_None);
    return PyModule_AddType(module, &type);
}
