"""A client that maps a file and closes its descriptor at once, as `safe_open` and `torch.load(mmap=True)` do.

    mapper.py write PATH SIZE    creates PATH and writes to the mapping until it is told to stop
    mapper.py read PATH          reads the mapping whenever it is asked

One rule: it says "mapped" when the descriptor is closed and only the mapping is left. Each line on its
stdin is a question: "check" is answered with the hash of what the mapping shows now (dropped from this
process's page tables before, so that it comes from where it lies), "stop" with the same as the last word,
after a writer has written its last bytes.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import select
import sys

_PAGE_BYTES = 4096


def digest(mapping: mmap.mmap) -> str:
    """A hash of the bytes that the mapping shows."""
    mapping.madvise(mmap.MADV_DONTNEED)
    return hashlib.blake2b(mapping[:], digest_size=16).hexdigest()


def asked(wait_s: float | None) -> str:
    """The next question, "" if there is none within `wait_s`."""
    if wait_s is not None and not select.select([sys.stdin], [], [], wait_s)[0]:
        return ""
    return sys.stdin.readline().strip() or "stop"


def write(path: str, size: int) -> None:
    """Write pages at random until "stop"."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    os.ftruncate(fd, size)
    mapping = mmap.mmap(fd, size)
    os.close(fd)
    print("mapped", flush=True)
    chance = random.Random(size)
    while True:
        at = chance.randrange(size // _PAGE_BYTES) * _PAGE_BYTES
        mapping[at : at + _PAGE_BYTES] = chance.randbytes(_PAGE_BYTES)
        question = asked(0.002)
        if question == "check":
            print(hashlib.blake2b(mapping[:], digest_size=16).hexdigest(), flush=True)
        elif question:
            print(hashlib.blake2b(mapping[:], digest_size=16).hexdigest(), flush=True)
            mapping.close()
            return


def read(path: str) -> None:
    """Answer until "stop"."""
    fd = os.open(path, os.O_RDONLY)
    mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    os.close(fd)
    print("mapped", flush=True)
    while (question := asked(None)) == "check":
        print(digest(mapping), flush=True)
    assert question == "stop"
    print(digest(mapping), flush=True)
    mapping.close()


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], int(sys.argv[3]))
    else:
        read(sys.argv[2])
