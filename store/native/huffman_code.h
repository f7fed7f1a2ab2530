/* A Huffman code, and how zstd wants it described; see huffman_code.c. */
#ifndef CKPTFS_HUFFMAN_CODE_H
#define CKPTFS_HUFFMAN_CODE_H
#include <stdint.h>

#define SYMBOLS 256
#define MAX_BITS 11
#define DESCRIPTION_ROOM 300 /* bytes that `write_code` may write to, at most 129 of them in use in the end */

struct code {
    uint8_t length[SYMBOLS]; /* of the code of each symbol, 0 for one that does not occur */
    int longest, last;       /* the longest length, and the highest symbol that occurs */
};

/* Writes the description of a code; NULL if it has none that is allowed, else its end. */
uint8_t *write_code(const struct code *code, uint8_t *out);

#endif
