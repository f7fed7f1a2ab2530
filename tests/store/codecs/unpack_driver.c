/*
 * Unpacks every case of a file, for the sanitizers: see test_unpacking.py, which writes it.
 *
 * A case, in u32: length, chunks, whether there is a parent; the parent; of each chunk the size of its body, its
 * power and its parameters, and the body. Prints how many there were, and how many were unpacked.
 */
#include <stdio.h>
#include <stdlib.h>

#include "loops.h"
#include "unpack.h"
#include "zstd_frame.h"

#define MOST_CHUNKS 16

/* `size` bytes of the file, in memory that ends where they end. */
static uint8_t *taken(FILE *file, size_t size)
{
    uint8_t *bytes = malloc(size ? size : 1);
    if (!bytes || fread(bytes, 1, size, file) != size)
        exit(2);
    return bytes;
}

static int run_case(struct room *room, FILE *file, const uint32_t *head)
{
    struct packed chunks[MOST_CHUNKS];
    uint32_t row[3];
    uint8_t *parent = head[2] ? taken(file, head[0]) : NULL, *target = malloc(head[0]);
    if (!target || head[1] > MOST_CHUNKS)
        exit(2);
    for (uint32_t at = 0; at < head[1]; at++) {
        if (fread(row, sizeof(row), 1, file) != 1)
            exit(2);
        chunks[at] = (struct packed){taken(file, row[0]), row[0], (int)row[1], (int)row[2]};
    }
    int is_done = unpack(room, chunks, head[1], parent, target, head[0]);
    for (uint32_t at = 0; at < head[1]; at++)
        free((void *)chunks[at].body);
    free(parent);
    free(target);
    return is_done;
}

int main(int count, char **words)
{
    FILE *file = count == 2 ? fopen(words[1], "rb") : NULL;
    struct room room;
    uint32_t head[3];
    int cases = 0, done = 0;
    if (!file || !find_zstd() || !open_room(&room))
        return 2;
    choose_loops();
    for (; fread(head, sizeof(head), 1, file) == 1; cases++)
        done += run_case(&room, file, head);
    close_room(&room);
    fclose(file);
    printf("%d %d\n", cases, done);
    return 0;
}
