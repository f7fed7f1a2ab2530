/*
 * Replies with what pyfuse3 has no words for: FUSE passthrough, and a node id that is not st_ino.
 *
 * This module is loaded with RTLD_GLOBAL before pyfuse3, so the dynamic linker binds pyfuse3's calls
 * of the functions below to the ones here.
 *
 * An OPEN or CREATE reply is built here only if `arm` was called for its file handle just before;
 * every other goes to libfuse. One thread: the one that runs the event loop. Nothing waits between
 * `arm` and the reply.
 *
 * `request` is the number of the request that libfuse was given last. pyfuse3 starts a handler before it
 * reads the next one, so until a handler first waits that is its own.
 *
 * `replaces`, likewise: whether it is a setxattr of an attribute that must be there. pyfuse3 asks getxattr of
 * our handlers first, and not what for.
 *
 * Requests are read without waiting: between the poll that says that there is one and the read, its caller
 * may have been killed and the kernel may have taken it back. A read that waits then would wait with the
 * event loop, for whatever request comes next. pyfuse3 goes back to its poll after EINTR, but not after
 * EAGAIN.
 *
 * A daemon that is killed while the kernel copies a request to it, or an answer from it, must not cost the
 * caller an error: the mount goes on with the next daemon. But a copy that meets a page which is not there
 * yet looks for signals before it fetches that page, and the request then ends with EIO. So every page of a
 * copy is there before it begins: requests are read into one block of memory whose pages were all touched,
 * and those of an answer are looked up first. One block is enough: pyfuse3 takes what it needs out of a
 * request before it waits for anything.
 *
 * A node id below 2^62 with bit 61 set is the second node of the inode that the other bits name
 * (see fusefs/nodes.py): st_ino is shown without that bit, in every reply that has attributes.
 *
 * Source: the kernel's FUSE protocol 7.40 (fuse_open_out, fuse_entry_out); libfuse's low-level API.
 */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 35
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/xattr.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

struct open_out {
    uint64_t fh;
    uint32_t open_flags;
    int32_t backing_id;
};

struct attr_out {
    uint64_t ino, size, blocks, atime, mtime, ctime;
    uint32_t atimensec, mtimensec, ctimensec;
    uint32_t mode, nlink, uid, gid, rdev, blksize, flags;
};

struct entry_out {
    uint64_t nodeid, generation, entry_valid, attr_valid;
    uint32_t entry_valid_nsec, attr_valid_nsec;
    struct attr_out attr;
};

struct create_out {
    struct entry_out entry;
    struct open_out open;
};

_Static_assert(sizeof(struct open_out) == 16, "fuse_open_out has 16 bytes");
_Static_assert(sizeof(struct entry_out) == 128, "fuse_entry_out has 128 bytes");

static struct {
    int armed;
    uint64_t fh;
    uint32_t flags;
    int32_t backing_id;
} next_reply;

/* libfuse's own function of a name that is defined here; looked up once. */
#define REAL(type, name)                              \
    static type real;                                 \
    if (!real)                                        \
        real = (type)dlsym(RTLD_NEXT, name);          \
    if (!real)                                        \
        return fuse_reply_err(req, ENOSYS)

static struct open_out take_open_out(void)
{
    struct open_out out = {next_reply.fh, next_reply.flags, next_reply.backing_id};
    next_reply.armed = 0;
    return out;
}

static int is_armed_for(const struct fuse_file_info *fi)
{
    return next_reply.armed && fi->fh == next_reply.fh;
}

/* While so much is copied, threads that decode go on: 1 MiB takes 0.3 ms. What is shown belongs to this one. */
#define LARGE_REPLY (64 * 1024)

#define SECOND_NODE (1ULL << 61)
#define FIRST_VIRTUAL (1ULL << 62)

static ino_t shown_ino(ino_t node)
{
    return node < FIRST_VIRTUAL ? node & ~SECOND_NODE : node;
}

static struct fuse_entry_param shown_entry(const struct fuse_entry_param *e)
{
    struct fuse_entry_param out = *e;
    out.attr.st_ino = shown_ino(e->attr.st_ino);
    return out;
}

static void set_timeout(double timeout_s, uint64_t *seconds, uint32_t *nanoseconds)
{
    double whole = timeout_s < 0 ? 0 : timeout_s;
    *seconds = (uint64_t)whole;
    *nanoseconds = (uint32_t)((whole - (double)*seconds) * 1e9);
}

static struct entry_out entry_out_of(const struct fuse_entry_param *e)
{
    struct entry_out out;
    const struct stat *st = &e->attr;
    memset(&out, 0, sizeof(out));
    out.nodeid = e->ino;
    out.generation = e->generation;
    set_timeout(e->entry_timeout, &out.entry_valid, &out.entry_valid_nsec);
    set_timeout(e->attr_timeout, &out.attr_valid, &out.attr_valid_nsec);
    out.attr.ino = shown_ino(st->st_ino);
    out.attr.size = (uint64_t)st->st_size;
    out.attr.blocks = (uint64_t)st->st_blocks;
    out.attr.atime = (uint64_t)st->st_atim.tv_sec;
    out.attr.mtime = (uint64_t)st->st_mtim.tv_sec;
    out.attr.ctime = (uint64_t)st->st_ctim.tv_sec;
    out.attr.atimensec = (uint32_t)st->st_atim.tv_nsec;
    out.attr.mtimensec = (uint32_t)st->st_mtim.tv_nsec;
    out.attr.ctimensec = (uint32_t)st->st_ctim.tv_nsec;
    out.attr.mode = st->st_mode;
    out.attr.nlink = (uint32_t)st->st_nlink;
    out.attr.uid = st->st_uid;
    out.attr.gid = st->st_gid;
    out.attr.rdev = (uint32_t)st->st_rdev;
    out.attr.blksize = (uint32_t)st->st_blksize;
    return out;
}

typedef int (*reply_buf_call)(fuse_req_t, const char *, size_t);
typedef int (*reply_open_call)(fuse_req_t, const struct fuse_file_info *);
typedef int (*reply_create_call)(fuse_req_t, const struct fuse_entry_param *, const struct fuse_file_info *);
typedef int (*reply_entry_call)(fuse_req_t, const struct fuse_entry_param *);
typedef int (*reply_attr_call)(fuse_req_t, const struct stat *, double);
typedef size_t (*add_direntry_call)(fuse_req_t, char *, size_t, const char *, const struct fuse_entry_param *, off_t);

static int reply_looked_up(reply_buf_call real, fuse_req_t req, const char *buf, size_t size)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)buf & ~(page - 1);
    /* A kernel before 5.14 does not know it, and a page that the disk does not give is for the copy to tell. */
    if (size)
        madvise((void *)begin, (uintptr_t)buf + size - begin, MADV_POPULATE_READ);
    return real(req, buf, size);
}

int fuse_reply_buf(fuse_req_t req, const char *buf, size_t size)
{
    REAL(reply_buf_call, "fuse_reply_buf");
    if (size < LARGE_REPLY || !PyGILState_Check())
        return reply_looked_up(real, req, buf, size);
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = reply_looked_up(real, req, buf, size);
    Py_END_ALLOW_THREADS
    return result;
}

int fuse_reply_open(fuse_req_t req, const struct fuse_file_info *fi)
{
    if (is_armed_for(fi)) {
        struct open_out out = take_open_out();
        return fuse_reply_buf(req, (const char *)&out, sizeof(out));
    }
    REAL(reply_open_call, "fuse_reply_open");
    return real(req, fi);
}

int fuse_reply_create(fuse_req_t req, const struct fuse_entry_param *e, const struct fuse_file_info *fi)
{
    if (is_armed_for(fi)) {
        struct create_out out;
        out.entry = entry_out_of(e);
        out.open = take_open_out();
        return fuse_reply_buf(req, (const char *)&out, sizeof(out));
    }
    REAL(reply_create_call, "fuse_reply_create");
    struct fuse_entry_param shown = shown_entry(e);
    return real(req, &shown, fi);
}

int fuse_reply_entry(fuse_req_t req, const struct fuse_entry_param *e)
{
    REAL(reply_entry_call, "fuse_reply_entry");
    struct fuse_entry_param shown = shown_entry(e);
    return real(req, &shown);
}

int fuse_reply_attr(fuse_req_t req, const struct stat *attr, double timeout_s)
{
    REAL(reply_attr_call, "fuse_reply_attr");
    struct stat shown = *attr;
    shown.st_ino = shown_ino(attr->st_ino);
    return real(req, &shown, timeout_s);
}

size_t fuse_add_direntry_plus(fuse_req_t req, char *buf, size_t room, const char *name,
                              const struct fuse_entry_param *e, off_t off)
{
    static add_direntry_call real;
    struct fuse_entry_param shown = shown_entry(e);
    if (!real)
        real = (add_direntry_call)dlsym(RTLD_NEXT, "fuse_add_direntry_plus");
    return real ? real(req, buf, room, name, &shown, off) : room + 1;
}

static uint64_t last_request;
static int last_replaces;

#define FUSE_SETXATTR_OPCODE 21

/* Where requests are read to: 1 MiB of payload with what stands before it, as libfuse asks for with pages of
 * 4 KiB; the kernel refuses to give anything to less than it may send. */
static char *room;
static size_t room_size;
#define MOST_ROOM ((size_t)64 << 20)

static int more_room(void)
{
    size_t size = room ? room_size * 2 : (size_t)(1024 + 64) << 10;
    char *more = size <= MOST_ROOM ? malloc(size) : NULL;
    if (!more)
        return 0;
    memset(more, 1, size);
    mlock(more, size); /* against swap; where it is not allowed, that has to do */
    if (room)
        munlock(room, room_size);
    free(room);
    room = more;
    room_size = size;
    return 1;
}

typedef void (*process_buf_call)(struct fuse_session *, const struct fuse_buf *);

void fuse_session_process_buf(struct fuse_session *se, const struct fuse_buf *buf)
{
    static process_buf_call real;
    if (!real)
        real = (process_buf_call)dlsym(RTLD_NEXT, "fuse_session_process_buf");
    if (!real)
        abort(); /* pyfuse3 could not have been loaded */
    /* fuse_in_header: u32 len, u32 opcode, u64 unique, …; fuse_setxattr_in: u32 size, u32 flags, … */
    uint32_t opcode, flags = 0;
    memcpy(&opcode, (const char *)buf->mem + 4, sizeof(opcode));
    memcpy(&last_request, (const char *)buf->mem + 8, sizeof(last_request));
    if (opcode == FUSE_SETXATTR_OPCODE && buf->size >= 48)
        memcpy(&flags, (const char *)buf->mem + 44, sizeof(flags));
    last_replaces = (flags & XATTR_REPLACE) != 0;
    real(se, buf);
    /* It is ours: pyfuse3 frees what it finds there. */
    ((struct fuse_buf *)buf)->mem = NULL;
}

int fuse_session_receive_buf(struct fuse_session *se, struct fuse_buf *buf)
{
    /* Each time: what lies below the number changes when a session begins. It costs 0.1 us. */
    int fd = fuse_session_fd(se), flags = fcntl(fd, F_GETFL);
    if (!room && !more_room())
        return -ENOMEM;
    if (flags >= 0 && !(flags & O_NONBLOCK))
        fcntl(fd, F_SETFL, flags | O_NONBLOCK);
    ssize_t got = read(fd, room, room_size);
    while (got < 0 && errno == EINVAL && more_room())
        got = read(fd, room, room_size);
    int failure = errno;
    if (fuse_session_exited(se))
        return 0;
    if (got >= 0 && got < 16)
        return -EIO; /* no request is so short */
    if (got > 0) {
        buf->mem = room;
        buf->size = (size_t)got;
        buf->flags = 0;
        return (int)got;
    }
    if (failure == ENODEV) { /* unmounted */
        fuse_session_exit(se);
        return 0;
    }
    /* ENOENT: its caller was killed while it was read. */
    return failure == EAGAIN || failure == ENOENT ? -EINTR : -failure;
}

static PyObject *request(PyObject *self, PyObject *args)
{
    (void)self;
    (void)args;
    return PyLong_FromUnsignedLongLong(last_request);
}

static PyObject *replaces(PyObject *self, PyObject *args)
{
    (void)self;
    (void)args;
    return PyBool_FromLong(last_replaces);
}

static PyObject *arm(PyObject *self, PyObject *args)
{
    unsigned long long fh;
    unsigned int flags;
    int backing_id;
    (void)self;
    if (!PyArg_ParseTuple(args, "KIi", &fh, &flags, &backing_id))
        return NULL;
    next_reply.armed = 1;
    next_reply.fh = fh;
    next_reply.flags = flags;
    next_reply.backing_id = backing_id;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"arm", arm, METH_VARARGS, "arm(fh, open_flags, backing_id): build the next reply for this file handle here."},
    {"request", request, METH_NOARGS, "request(): the number of the request that was read last, bit 63 if it came again."},
    {"replaces", replaces, METH_NOARGS, "replaces(): whether that is a setxattr of an attribute that must be there."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_replies", "FUSE replies with a backing id, or of a second node.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__replies(void)
{
    return PyModule_Create(&module);
}
