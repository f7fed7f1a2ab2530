/* The functions of ckptfs.store._planes that codec 5 needs; see context_methods.c. */
#ifndef CKPTFS_CONTEXT_METHODS_H
#define CKPTFS_CONTEXT_METHODS_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *context_counts(PyObject *self, PyObject *args);
PyObject *context_pack(PyObject *self, PyObject *args);
PyObject *context_unpack(PyObject *self, PyObject *args);

#endif
