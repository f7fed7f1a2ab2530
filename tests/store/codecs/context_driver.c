/*
 * Unpacks every case of a file, for the sanitizers, and packs what it should have been: see test_context.py,
 * which writes it.
 *
 * A case, in u32: length, size of the body, width, bits of the fraction; the source, its parent, the body. Prints
 * how many there were, how many were unpacked, and how many of these were the source.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "context.h"

/* `size` bytes of the file, in memory that ends where they end. */
static uint8_t *taken(FILE *file, size_t size)
{
    uint8_t *bytes = malloc(size ? size : 1);
    if (!bytes || fread(bytes, 1, size, file) != size)
        exit(2);
    return bytes;
}

/* As if every symbol were as frequent; what has no frequency then ends it. */
static void pack_case(const struct pair *pair)
{
    static uint16_t frequencies[MOST_CONTEXTS][SYMBOLS];
    static uint32_t counts[EXPONENTS][SYMBOLS];
    static uint8_t context_of[EXPONENTS];
    for (int context = 0; context < MOST_CONTEXTS; context++)
        for (int symbol = 0; symbol < SYMBOLS; symbol++)
            frequencies[context][symbol] = SCALE / SYMBOLS;
    for (int exponent = 0; exponent < EXPONENTS; exponent++)
        context_of[exponent] = (uint8_t)(exponent % MOST_CONTEXTS);
    uint8_t *target = malloc(context_room(pair->count));
    if (!target || !pack_context(pair, context_of, (const uint16_t(*)[SYMBOLS])frequencies, target))
        exit(2);
    frequencies[3][4] = 0;
    pack_context(pair, context_of, (const uint16_t(*)[SYMBOLS])frequencies, target);
    count_symbols(pair, counts);
    free(target);
}

int main(int count, char **words)
{
    FILE *file = count == 2 ? fopen(words[1], "rb") : NULL;
    uint32_t head[4];
    int cases = 0, done = 0, right = 0;
    if (!file)
        return 2;
    for (; fread(head, sizeof(head), 1, file) == 1; cases++) {
        uint8_t *source = taken(file, head[0]), *parent = taken(file, head[0]), *body = taken(file, head[1]);
        uint8_t *target = malloc(head[0] ? head[0] : 1);
        if (!target)
            return 2;
        struct pair pair = {source, parent, head[0] / head[2], (int)head[2], (int)head[3]};
        if (unpack_context(&pair, body, head[1], target, head[0])) {
            done++;
            right += !memcmp(source, target, head[0]);
        }
        pack_case(&pair);
        free(source);
        free(parent);
        free(body);
        free(target);
    }
    fclose(file);
    printf("%d %d %d\n", cases, done, right);
    return 0;
}
