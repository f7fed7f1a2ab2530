"""A file in memory, as the parsers of formats read one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BytesReader:
    """The Reader protocol over `content`; reads that no parser may make fail."""

    content: bytes

    @property
    def size(self) -> int:
        return len(self.content)

    def pread(self, offset: int, length: int) -> bytes:
        assert offset >= 0 and length >= 0
        return self.content[offset : offset + length]
