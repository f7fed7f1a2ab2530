/*
 * The native door to zstd: frames of the encoded chunks, without Python.
 *
 * libzstd is looked up when the module is loaded, not linked: it is there on every Debian and Ubuntu (dpkg needs
 * it), its headers are not. Where it is missing, the module `zstandard` reads the frames, as it reads those that are
 * refused here. What comes out of a damaged frame differs between releases of zstd, and is not the chunk in any.
 *
 * Source: RFC 8878, 3.1.1.1 (frame header); store/FORMAT.md, "A zstd frame"; the stable API of zstd.h.
 */
#include "zstd_frame.h"

#include <dlfcn.h>
#include <string.h>

#define SMALLEST_WINDOW 1024
#define MAGIC 0xfd2fb528u
#define LONGEST_HEADER 14 /* without a dictionary */

/* The descriptor of a frame header: which fields there are. */
#define IS_SEGMENT 0x20
#define REFUSED 0x0f /* reserved, checksum, dictionary; bit 4 is for nothing */

static void *(*create_context)(void);
static size_t (*free_context)(void *);
static size_t (*decompress)(void *, void *, size_t, const void *, size_t);
static size_t (*frame_size)(const void *, size_t);

static void *function_of(void *library, const char *name, int *missing)
{
    void *found = dlsym(library, name);
    *missing |= !found;
    return found;
}

int find_zstd(void)
{
    int missing = 0;
    void *library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return 0;
    /* ISO C has no cast from an object to a function; POSIX says that this works. */
    *(void **)&create_context = function_of(library, "ZSTD_createDCtx", &missing);
    *(void **)&free_context = function_of(library, "ZSTD_freeDCtx", &missing);
    *(void **)&decompress = function_of(library, "ZSTD_decompressDCtx", &missing);
    *(void **)&frame_size = function_of(library, "ZSTD_findFrameCompressedSize", &missing);
    return !missing;
}

void *open_frames(void)
{
    return create_context();
}

void close_frames(void *frames)
{
    free_context(frames);
}

/* The window that a byte of the header stands for. */
static uint64_t window_of(uint8_t byte)
{
    uint64_t base = (uint64_t)1 << (10 + (byte >> 3));
    return base + base / 8 * (byte & 7);
}

/* Whether a header says what it has to: content of `length` bytes, and a window that takes no more room. */
static int has_good_header(const uint8_t *frame, size_t size, uint64_t length)
{
    static const size_t widths[] = {1, 2, 4, 8};
    uint8_t header[LONGEST_HEADER + 8] = {0};
    uint32_t magic;
    uint64_t content;
    memcpy(header, frame, size < LONGEST_HEADER ? size : LONGEST_HEADER);
    memcpy(&magic, header, sizeof(magic));
    uint8_t what = header[4];
    size_t at = 5, width = widths[what >> 6];
    if (magic != MAGIC || what & REFUSED)
        return 0;
    if (!(what & IS_SEGMENT)) {
        if (width == 1 || window_of(header[at++]) > (length < SMALLEST_WINDOW ? SMALLEST_WINDOW : length))
            return 0;
    }
    memcpy(&content, header + at, sizeof(content));
    if (width < 8)
        content &= ((uint64_t)1 << 8 * width) - 1;
    return at + width <= size && content + (width == 2 ? 256 : 0) == length;
}

int read_frame(void *frames, const uint8_t *frame, size_t size, uint8_t *target, size_t length)
{
    /* An error is a size that nothing has. */
    return has_good_header(frame, size, length) && frame_size(frame, size) == size &&
           decompress(frames, target, length, frame, size) == length;
}
