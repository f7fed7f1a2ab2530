/* The Python type Block; see block.c. */
#ifndef CKPTFS_BLOCK_H
#define CKPTFS_BLOCK_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Adds the type to a module; -1 with an exception set. */
int add_block(PyObject *module);

#endif
