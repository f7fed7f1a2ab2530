"""Numbers by number in memory that outlives the process: a sparse file of 64-bit words.

One rule: a page of 512 words takes memory while one of them is not zero, and only then. Storing a word is one
store of the processor, so whoever takes the file over finds each word as it was before or after it.

Source: SEMANTICS.md, "When the daemon dies".
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator

PAGE_BYTES = 4096
_PAGE_WORDS = PAGE_BYTES // 8
_WINDOW_BYTES = 1 << 26
_WINDOW_WORDS = _WINDOW_BYTES // 8
REGION_BYTES = 1 << 56


class Words:
    """Words 0 to 2^53 - 1 of the region that begins at byte `start` of a file. Belongs to the trio thread."""

    def __init__(self, fd: int, start: int) -> None:
        self._fd = fd
        self._start = start
        self._windows: dict[int, tuple[mmap.mmap, memoryview]] = {}
        self._used: dict[int, int] = {}
        for page in self._pages_on_file():
            self._count(page)

    def __getitem__(self, at: int) -> int:
        if at // _PAGE_WORDS not in self._used:
            return 0  # looking at it would make the page
        word: int = self._windows[at // _WINDOW_WORDS][1][at % _WINDOW_WORDS]
        return word

    def __setitem__(self, at: int, word: int) -> None:
        page = at // _PAGE_WORDS
        before = self[at]
        if not before and not word:
            return
        mapped, words = self._window(at // _WINDOW_WORDS)
        words[at % _WINDOW_WORDS] = word
        self._used[page] = self._used.get(page, 0) + (word != 0) - (before != 0)
        if not self._used[page]:
            del self._used[page]
            mapped.madvise(mmap.MADV_REMOVE, page * PAGE_BYTES % _WINDOW_BYTES, PAGE_BYTES)

    def items(self) -> Iterator[tuple[int, int]]:
        """(number, word) of all that are not zero, in order. None may be changed meanwhile."""
        for page in sorted(self._used):
            for at in range(page * _PAGE_WORDS, (page + 1) * _PAGE_WORDS):
                if self[at]:
                    yield at, self[at]

    def _window(self, number: int) -> tuple[mmap.mmap, memoryview]:
        window = self._windows.get(number)
        if window is None:
            at = self._start + number * _WINDOW_BYTES
            mapped = mmap.mmap(self._fd, _WINDOW_BYTES, offset=at)
            window = self._windows[number] = (mapped, memoryview(mapped).cast("Q"))
        return window

    def _pages_on_file(self) -> Iterator[int]:
        at, end = self._start, self._start + REGION_BYTES
        while True:
            try:
                begin = os.lseek(self._fd, at, os.SEEK_DATA)
            except OSError as e:
                if e.errno != errno.ENXIO:
                    raise
                return
            if begin >= end:
                return
            at = os.lseek(self._fd, begin, os.SEEK_HOLE)
            yield from range((begin - self._start) // PAGE_BYTES, (min(at, end) - self._start) // PAGE_BYTES)

    def _count(self, page: int) -> None:
        first = page * _PAGE_WORDS
        _, words = self._window(first // _WINDOW_WORDS)
        at = first % _WINDOW_WORDS
        used = _PAGE_WORDS - words[at : at + _PAGE_WORDS].tolist().count(0)
        if used:
            self._used[page] = used
