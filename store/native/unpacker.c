/*
 * The Python type Unpacker: the memory that a thread unpacks chunks in (unpack.c), and the way there.
 *
 * The GIL is released while chains are unpacked: once for all that one call is given, since a thread that takes
 * it back waits for its turn each time. An object is used by one thread at a time; a second one is told so.
 */
#include "unpacker.h"

#include "unpack.h"
#include "zstd_frame.h"

#define MOST_CHUNKS 16 /* more than a chain may have */
#define MOST_CHAINS 4096

typedef struct {
    PyObject_HEAD struct room room;
    int is_used;
} Unpacker;

/* A chain that a call was given. `taken` buffers of `views` are to be released. */
struct arguments {
    struct packed chunks[MOST_CHUNKS];
    Py_buffer views[MOST_CHUNKS];
    Py_ssize_t count, taken, length;
    Py_buffer parent;
    int is_done;
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

/* Writes the bytes of all chains to `target`, one behind the other. Sets `is_done` of each. */
static void unpack_to(uint8_t *target, Unpacker *self, struct arguments *chains, Py_ssize_t count)
{
    self->is_used = 1;
    Py_BEGIN_ALLOW_THREADS
    for (struct arguments *one = chains; one < chains + count; target += one++->length)
        one->is_done = unpack(
            &self->room, one->chunks, (size_t)one->count, one->parent.buf, target, (size_t)one->length);
    Py_END_ALLOW_THREADS
    self->is_used = 0;
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
        result = PyBytes_FromStringAndSize(NULL, taken.length);
    if (result)
        unpack_to((uint8_t *)PyBytes_AS_STRING(result), self, &taken, 1);
    let_go(&taken);
    Py_DECREF(chunks);
    if (!result || taken.is_done)
        return result;
    Py_DECREF(result);
    Py_RETURN_NONE;
}

/* Takes the chunks, the parent and the length of one chain; -1 with an exception set. */
static int take_chain(struct arguments *taken, PyObject *object)
{
    PyObject *chunks, *parent;
    if (!PyTuple_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "a chain is a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(object, "OOn;a chain is its chunks, a parent and a length", &chunks, &parent, &taken->length))
        return -1;
    chunks = PySequence_Fast(chunks, "chunks are a sequence");
    if (!chunks)
        return -1;
    int is_taken = take(taken, chunks, parent);
    Py_DECREF(chunks);
    return is_taken;
}

/* Which of the chains that were taken are in `target` now. */
static PyObject *all_unpacked(Unpacker *self, const Py_buffer *target, struct arguments *chains, Py_ssize_t count)
{
    PyObject *are_done = PyTuple_New(count);
    if (!are_done)
        return NULL;
    unpack_to(target->buf, self, chains, count);
    for (Py_ssize_t at = 0; at < count; at++)
        PyTuple_SET_ITEM(are_done, at, PyBool_FromLong(chains[at].is_done));
    return are_done;
}

/* The length of all of `count` chains; -1 with an exception set. `taken` counts those that are to be let go. */
static Py_ssize_t take_chains(struct arguments *all, PyObject *chains, Py_ssize_t count, Py_ssize_t *taken)
{
    Py_ssize_t length = 0;
    while (*taken < count) {
        struct arguments *one = &all[*taken];
        if (take_chain(one, PySequence_Fast_GET_ITEM(chains, (*taken)++)) < 0)
            return -1;
        if (one->length > PY_SSIZE_T_MAX - length) {
            PyErr_NoMemory();
            return -1;
        }
        length += one->length;
    }
    return length;
}

static PyObject *unpack_chains(PyObject *object, PyObject *args)
{
    Unpacker *self = (Unpacker *)object;
    PyObject *chains, *result = NULL;
    Py_buffer target;
    Py_ssize_t count, taken = 0, length = -1;
    if (self->is_used)
        return PyErr_Format(PyExc_RuntimeError, "another thread uses this unpacker");
    if (!PyArg_ParseTuple(args, "Ow*:unpack_all", &chains, &target))
        return NULL;
    chains = PySequence_Fast(chains, "chains are a sequence");
    count = chains ? PySequence_Fast_GET_SIZE(chains) : 0;
    struct arguments *all = count <= MOST_CHAINS ? PyMem_Calloc((size_t)count + 1, sizeof(*all)) : NULL;
    if (!all)
        PyErr_SetString(PyExc_MemoryError, "no memory for so many chains");
    else if (chains)
        length = take_chains(all, chains, count, &taken);
    if (length > target.len)
        PyErr_SetString(PyExc_ValueError, "less room than the chains need");
    else if (length >= 0)
        result = all_unpacked(self, &target, all, count);
    while (taken)
        let_go(&all[--taken]);
    PyMem_Free(all);
    Py_XDECREF(chains);
    PyBuffer_Release(&target);
    return result;
}

static PyMethodDef methods[] = {
    {"unpack", unpack_chunks, METH_VARARGS, "unpack(chunks, parent, length): plain bytes, or None."},
    {"unpack_all", unpack_chains, METH_VARARGS, "unpack_all(chains, target): which of them are there."},
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
