/*
 * Replies to OPEN and CREATE with what pyfuse3 has no words for: FUSE passthrough.
 *
 * This module is loaded with RTLD_GLOBAL before pyfuse3, so the dynamic linker binds pyfuse3's calls
 * of fuse_reply_open and fuse_reply_create to the functions here. A reply is built here only if
 * `arm` was called for its file handle just before; every other goes to libfuse unchanged.
 *
 * One thread: the one that runs the event loop. Nothing waits between `arm` and the reply.
 *
 * Source: the kernel's FUSE protocol 7.40 (fuse_open_out, fuse_entry_out); libfuse's low-level API.
 */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 35
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <errno.h>
#include <fuse_lowlevel.h>
#include <stdint.h>
#include <string.h>

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
    out.attr.ino = st->st_ino;
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

typedef int (*reply_open_call)(fuse_req_t, const struct fuse_file_info *);
typedef int (*reply_create_call)(fuse_req_t, const struct fuse_entry_param *, const struct fuse_file_info *);

int fuse_reply_open(fuse_req_t req, const struct fuse_file_info *fi)
{
    if (is_armed_for(fi)) {
        struct open_out out = take_open_out();
        return fuse_reply_buf(req, (const char *)&out, sizeof(out));
    }
    reply_open_call real = (reply_open_call)dlsym(RTLD_NEXT, "fuse_reply_open");
    return real ? real(req, fi) : fuse_reply_err(req, ENOSYS);
}

int fuse_reply_create(fuse_req_t req, const struct fuse_entry_param *e, const struct fuse_file_info *fi)
{
    if (is_armed_for(fi)) {
        struct create_out out;
        out.entry = entry_out_of(e);
        out.open = take_open_out();
        return fuse_reply_buf(req, (const char *)&out, sizeof(out));
    }
    reply_create_call real = (reply_create_call)dlsym(RTLD_NEXT, "fuse_reply_create");
    return real ? real(req, e, fi) : fuse_reply_err(req, ENOSYS);
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
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_replies", "OPEN and CREATE replies with a backing id.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__replies(void)
{
    return PyModule_Create(&module);
}
