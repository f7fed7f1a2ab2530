"""Tensor files of a soak that are changed in place while others read them, and what they may hold.

The one rule: each block of 4 KiB says which file, which place and which generation it is of, so that a reader
can tell right bytes from wrong ones whatever was overwritten, and the one writer of a file knows all of it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

BLOCK_BYTES = 4096
BLOCKS = 320
SUFFIX = ".safetensors"
_TRIES = 5
_TORN_S = 0.05


@functools.lru_cache(maxsize=1)
def header() -> bytes:
    """One block that says that one tensor of all other blocks follows."""
    size = BLOCKS * BLOCK_BYTES
    said = {"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    encoded = json.dumps(said).encode().ljust(BLOCK_BYTES - 8)
    return len(encoded).to_bytes(8, "little") + encoded


def block(number: int, generation: int, index: int) -> bytes:
    """Block `index` of file `number` as it was written at one time."""
    place = generation.to_bytes(8, "little")
    of = hashlib.blake2b(b"%d %d %d" % (number, generation, index), digest_size=56).digest()
    return (place + of) * (BLOCK_BYTES // 64)


def wrong_in(name: str, content: bytes | mmap.mmap) -> str | None:
    """What is wrong in a file of this name; None if every block is one that was written to its place."""
    number = int(name.removesuffix(SUFFIX))
    if content[:BLOCK_BYTES] != header()[: len(content)]:
        return "the header is another"
    if len(content) > (BLOCKS + 1) * BLOCK_BYTES or len(content) % BLOCK_BYTES:
        return f"{len(content)} bytes are no whole number of blocks, or too many"
    for index in range(len(content) // BLOCK_BYTES - 1):
        found = content[(index + 1) * BLOCK_BYTES : (index + 2) * BLOCK_BYTES]
        if found != block(number, int.from_bytes(found[:8], "little"), index):
            return f"block {index} was never written there: {found[:16].hex()}"
    return None


def lasting_wrong(name: str, read: Callable[[], bytes | mmap.mmap]) -> str | None:
    """The same of bytes that somebody may be writing just now: what is torn is whole a moment later."""
    for _ in range(_TRIES):
        wrong = wrong_in(name, read())
        if wrong is None:
            return None
        time.sleep(_TORN_S)
    return wrong


class TensorFile:
    """A file that this process alone writes, and what it must hold."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number
        self._generations = [0] * BLOCKS
        self._newest = 0
        path.write_bytes(self.content())

    def content(self) -> bytes:
        """What it must hold now."""
        blocks = (block(self.number, of, index) for index, of in enumerate(self._generations))
        return b"".join([header(), *blocks])

    def change(self, chance: random.Random) -> list[str]:
        """Change it in place; what was wrong with what readers got before, meanwhile and behind it."""
        before = self.content()
        with self.path.open("rb") as reader, mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ) as view:
            if reader.read() != before:
                return [f"{self.path} is not what was written before it was changed"]
            chance.choice((self._overwrite, self._rewrite, self._cut_and_add))(chance)
            now, size = self.content(), os.fstat(reader.fileno()).st_size
            kept = os.pread(reader.fileno(), size + 1, 0)
            seen = view[:]
            wrong = []
            if self.path.read_bytes() != now:
                wrong.append(f"{self.path} opened after a change has other bytes than were written")
            for how, got in (("read", kept), ("mapped", seen)):
                if got not in (before, now):
                    wrong.append(f"{self.path} opened before a change, {how}: neither old nor new bytes")
        return wrong

    def _next(self, first: int, last: int) -> bytes:
        self._newest += 1
        self._generations[first:last] = [self._newest] * (last - first)
        return b"".join(block(self.number, self._newest, index) for index in range(first, last))

    def _overwrite(self, chance: random.Random) -> None:
        first = chance.randrange(BLOCKS)
        with self.path.open("r+b", buffering=0) as file:
            file.seek((first + 1) * BLOCK_BYTES)
            file.write(self._next(first, min(BLOCKS, first + chance.randrange(1, 100))))

    def _rewrite(self, chance: random.Random) -> None:
        written = self._next(0, BLOCKS)
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(fd, header() + written)
        os.close(fd)

    def _cut_and_add(self, chance: random.Random) -> None:
        first = chance.randrange(1, BLOCKS)
        os.truncate(self.path, (first + 1) * BLOCK_BYTES)
        with self.path.open("ab", buffering=0) as file:
            file.write(self._next(first, BLOCKS))
