"""Memory between two pages that nobody may touch."""

from __future__ import annotations

import ctypes
import mmap

_PAGE = mmap.PAGESIZE
_NO_ACCESS = 0  # PROT_NONE


class Guarded:
    """`payload` in memory of its own, at an address with `skew` = address % 16.

    It ends at the page that may not be touched, or up to 15 bytes before it; with `at_start` it begins
    behind such a page instead. Freed with the object.
    """

    def __init__(self, payload: bytes, skew: int, *, at_start: bool = False) -> None:
        pages = -(-(len(payload) + 32) // _PAGE)
        self._memory = mmap.mmap(-1, (pages + 2) * _PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        libc = ctypes.CDLL(None, use_errno=True)
        for guard in (start, start + (pages + 1) * _PAGE):
            if libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(_PAGE), _NO_ACCESS):
                raise OSError(ctypes.get_errno(), "mprotect")
        first, last = start + _PAGE, start + (pages + 1) * _PAGE - len(payload)
        self.address = first + skew if at_start else last - (last - skew) % 16
        self.length = len(payload)
        ctypes.memmove(self.address, payload, len(payload))
