// All kernels of ckptfs: one translation unit, one fatbin.
#include "blake3.cu"
#include "crc64.cu"
