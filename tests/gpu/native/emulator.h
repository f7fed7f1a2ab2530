// Between the kernels (compiled with a call before each load and store) and what runs them.
#pragma once
#include <cstddef>
#include <cstdint>

struct Kernel {
    const char *name;
    uint32_t threads;  // what __launch_bounds__ says, and the only size that these kernels are made for
    size_t argument_bytes;
    void (*call)(const void *packed);
};

struct Range {
    uintptr_t start;
    size_t bytes;
    bool writable;
};

extern const Kernel kernels[];
extern const size_t kernel_count;
extern const Range constant_memory;
