/*
 * The Python type Block: memory for chunks that are decoded together, which is used again.
 *
 * A buffer of 4 MiB from malloc is given back to the kernel and comes anew, page by page: a twelfth of what a
 * decoded file costs. A block is made of huge pages where there are any, and the last few that nobody refers to
 * any more are kept for the next ones. Whoever has a view of a block refers to it; so memory that somebody may
 * look at is never used again.
 *
 * What is kept is touched with the GIL only. What is in a new block is anything.
 */
#include "block.h"

#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)
#define MOST_KEPT 16
#define MOST_KEPT_BYTES ((size_t)32 << 20)

typedef struct {
    PyObject_HEAD void *bytes;
    size_t size;
} Block;

/* The one that was let go first comes first. */
static struct memory {
    void *bytes;
    size_t size;
} kept[MOST_KEPT];
static int kept_count;
static size_t kept_bytes;

static struct memory taken_at(int at)
{
    struct memory one = kept[at];
    kept_bytes -= one.size;
    memmove(&kept[at], &kept[at + 1], (size_t)(--kept_count - at) * sizeof(*kept));
    return one;
}

static void *taken(size_t size)
{
    for (int at = kept_count - 1; at >= 0; at--)
        if (kept[at].size == size)
            return taken_at(at).bytes;
    return NULL;
}

/* Others go first, so that a size that nobody wants any more does not stay. */
static void keep(struct memory one)
{
    if (one.size > MOST_KEPT_BYTES) {
        munmap(one.bytes, one.size);
        return;
    }
    while (kept_count == MOST_KEPT || kept_bytes + one.size > MOST_KEPT_BYTES) {
        struct memory first = taken_at(0);
        munmap(first.bytes, first.size);
    }
    kept[kept_count++] = one;
    kept_bytes += one.size;
}

/* Begins at a huge page: what comes before it and behind it is given back. */
static void *mapped(size_t size)
{
    char *all = mmap(NULL, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED)
        return NULL;
    size_t before = -(uintptr_t)all & (HUGE_PAGE - 1);
    if (before)
        munmap(all, before);
    munmap(all + before + size, HUGE_PAGE - before);
    madvise(all + before, size, MADV_HUGEPAGE); /* where there are none, pages do */
    return all + before;
}

static PyObject *new_block(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "n:Block", &length) || (keywords && PyDict_GET_SIZE(keywords)))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "Block takes a length");
    if (length < 1 || (size_t)length > (size_t)PY_SSIZE_T_MAX - 2 * HUGE_PAGE)
        return PyErr_Format(PyExc_ValueError, "a block of %zd bytes", length);
    Block *self = (Block *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->size = ((size_t)length + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
    self->bytes = taken(self->size);
    if (!self->bytes)
        self->bytes = mapped(self->size);
    if (self->bytes)
        return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_NoMemory();
}

static void delete_block(PyObject *object)
{
    Block *self = (Block *)object;
    if (self->bytes)
        keep((struct memory){self->bytes, self->size});
    Py_TYPE(object)->tp_free(object);
}

static int show_block(PyObject *object, Py_buffer *view, int flags)
{
    Block *self = (Block *)object;
    return PyBuffer_FillInfo(view, object, self->bytes, (Py_ssize_t)self->size, 0, flags);
}

static PyBufferProcs buffer = {.bf_getbuffer = show_block};

static PyTypeObject type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "ckptfs.store._planes.Block",
    .tp_doc = "Block(length): at least so many bytes of memory.",
    .tp_basicsize = sizeof(Block),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = new_block,
    .tp_dealloc = delete_block,
    .tp_as_buffer = &buffer,
};

int add_block(PyObject *module)
{
    return PyModule_AddType(module, &type);
}
