/* One zstd frame, decompressed by the system's libzstd; see zstd_frame.c. */
#ifndef CKPTFS_ZSTD_FRAME_H
#define CKPTFS_ZSTD_FRAME_H
#include <stddef.h>
#include <stdint.h>

/* Looks for libzstd; 0 if this machine has none that will do. Before anything else here. */
int find_zstd(void);

/* What a thread needs to decompress; NULL if there is no memory. Free it with `close_frames`. */
void *open_frames(void);
void close_frames(void *frames);

/*
 * Writes the `length` (at least 1) bytes in `frame` to `target`. 0 if that is not exactly one frame of that many,
 * as store/FORMAT.md wants them; `target` then holds anything. Bytes outside of either are not touched.
 */
int read_frame(void *frames, const uint8_t *frame, size_t size, uint8_t *target, size_t length);

#endif
