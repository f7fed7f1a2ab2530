/* The Python type Unpacker; see unpacker.c. */
#ifndef CKPTFS_UNPACKER_H
#define CKPTFS_UNPACKER_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Adds the type to a module; None in its place where there is no libzstd. -1 with an exception set. */
int add_unpacker(PyObject *module);

/* The exponent of an element's width; -1 with an exception set if there is no such element. */
int power_of_width(Py_ssize_t width);

#endif
