/* Planes of a chunk and of those that it is encoded against, joined in one go; see unpack.c. */
#ifndef CKPTFS_UNPACK_H
#define CKPTFS_UNPACK_H
#include <stddef.h>
#include <stdint.h>

/* A chunk: its body, and what its elements are. */
struct packed {
    const uint8_t *body;
    size_t size;
    int power;
    int parameters;
};

/* Memory that is used again for each chunk. One thread at a time. */
struct room {
    void *frames;
    uint8_t *bytes;
    size_t size;
};

/* 0 if there is no memory. What was opened is to be closed. */
int open_room(struct room *room);
void close_room(struct room *room);

/*
 * Writes the `length` bytes of the last of `count` chunks to `target`. Each is the difference to the one before it;
 * the first stands alone, or is the difference to `parent`, which is not NULL then. All are `length` bytes long.
 * 0 if they are not such chunks, or there is no memory; `target` then holds anything.
 */
int unpack(
    struct room *room, const struct packed *chunks, size_t count, const uint8_t *parent, uint8_t *target,
    size_t length);

#endif
