/* A zstd frame of Huffman-coded literals and nothing else; see huffman.c. */
#ifndef CKPTFS_HUFFMAN_H
#define CKPTFS_HUFFMAN_H
#include <stddef.h>
#include <stdint.h>

/* Bytes that `huffman_frame` may write to for a source of `length` bytes. */
size_t huffman_room(size_t length);

/* Writes the frame to `target` and returns its length; 0 if zstd itself does better, or nothing does. */
size_t huffman_frame(const uint8_t *source, size_t length, uint8_t *target);

#endif
