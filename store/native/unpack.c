/*
 * From the bodies of encoded chunks to plain bytes, in one call: what store/codecs/decoding.py does piece by piece.
 *
 * A reader's threads take turns at the GIL: a call for each plane hands it over ten times for a chunk, and each
 * time some thread waits to be woken. And what lies between, planes and parents, stays in memory that is in the
 * cache. Whatever is not as it should be is refused here, and said there.
 *
 * Source: store/FORMAT.md, "Planes".
 */
#include "unpack.h"

#include <stdlib.h>
#include <string.h>

#include "loops.h"
#include "zstd_frame.h"

/* What is kept from one call to the next: the room for a chunk as long as those that tensors are cut to. */
#define KEPT_BYTES (3 * 256 * 1024)

int open_room(struct room *room)
{
    room->bytes = NULL;
    room->size = 0;
    room->frames = open_frames();
    return room->frames != NULL;
}

void close_room(struct room *room)
{
    if (room->frames)
        close_frames(room->frames);
    free(room->bytes);
    room->bytes = NULL;
    room->frames = NULL;
}

static int has_room(struct room *room, size_t size)
{
    if (size <= room->size)
        return 1;
    free(room->bytes);
    room->bytes = malloc(size);
    room->size = room->bytes ? size : 0;
    return room->bytes != NULL;
}

/* `planes` has room for all planes. */
static int unpack_one(
    void *frames, const struct packed *chunk, const uint8_t *parent, uint8_t *planes, uint8_t *target, size_t length)
{
    const uint8_t *starts[MAX_WIDTH];
    uint32_t stored[MAX_WIDTH];
    size_t width = (size_t)1 << chunk->power, count = length >> chunk->power, whole = count << chunk->power;
    size_t at = 4 * width, end = at + length - whole;
    if (chunk->size < at)
        return 0;
    memcpy(stored, chunk->body, at);
    for (size_t plane = 0; plane < width; plane++) {
        if (stored[plane] > count)
            return 0;
        end += stored[plane];
    }
    if (end != chunk->size)
        return 0;
    for (size_t plane = 0; plane < width; at += stored[plane++]) {
        uint8_t *made = planes + plane * count;
        starts[plane] = stored[plane] == count ? chunk->body + at : made;
        if (stored[plane] < count && !read_frame(frames, chunk->body + at, stored[plane], made, count))
            return 0;
    }
    struct work work = {chunk->power, transform_of(chunk->parameters, parent != NULL), parent, count};
    join_planes(&work, starts, target);
    memcpy(target + whole, chunk->body + at, length - whole);
    return 1;
}

int unpack(
    struct room *room, const struct packed *chunks, size_t count, const uint8_t *parent, uint8_t *target, size_t length)
{
    /* Planes, and two plain chunks: the one that is made and the one it is made from. */
    int is_done = length <= SIZE_MAX / 3 && has_room(room, 3 * length);
    for (size_t at = 0; is_done && at < count; at++) {
        uint8_t *made = at + 1 == count ? target : room->bytes + (1 + at % 2) * length;
        is_done = unpack_one(room->frames, &chunks[at], parent, room->bytes, made, length);
        parent = made;
    }
    if (room->size > KEPT_BYTES) {
        free(room->bytes);
        room->bytes = NULL;
        room->size = 0;
    }
    return is_done;
}
