"""The door to zstd: frames of bytes, and back within bounds.

One rule: nothing is decompressed before its header says that exactly the expected number of bytes comes out,
so a frame takes no more memory than its reader has agreed to.

Source: RFC 8878; FORMAT.md, "Encoded chunks".
"""

from __future__ import annotations

from typing import Final

import zstandard

from ckptfs.store.codecs.kernels import huffman_frame, new_unpacker
from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import Buffer

_LEVEL: Final = 3
_SMALLEST_WINDOW: Final = 1024

# As good as no search for matches: a table of 64 slots and matches of 7 bytes at least. Level 3 finds matches
# of 4 and 5 bytes in a float's exponents, which cost more than they save (2.5 instead of 3.1, at a fifth of
# the speed). The window is larger than any plane of a tensor chunk: its frame's header then needs none.
_HUFFMAN: Final = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=18,
    hash_log=zstandard.HASHLOG_MIN,
    chain_log=zstandard.CHAINLOG_MIN,
    search_log=zstandard.SEARCHLOG_MIN,
    min_match=zstandard.MINMATCH_MAX,
    target_length=0,
    write_content_size=True,
    write_checksum=False,
    write_dict_id=False,
)


class Coder:
    """Makes and reads frames, without the GIL. Owned by one thread at a time, as zstd's contexts are."""

    __slots__ = ("_huffman", "_reader", "_searching", "unpacker")

    def __init__(self) -> None:
        self._huffman = zstandard.ZstdCompressor(compression_params=_HUFFMAN)
        self._searching = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
        self._reader = zstandard.ZstdDecompressor()
        self.unpacker = new_unpacker()

    def huffman(self, plain: Buffer) -> bytes:
        """A frame of bytes that do not repeat but are not equally frequent."""
        return huffman_frame(plain) or self._huffman.compress(plain)

    def searching(self, plain: Buffer) -> bytes:
        """A frame of bytes of any kind (level 3)."""
        return self._searching.compress(plain)

    def plain(self, frame: Buffer, length: int) -> bytes:
        """The `length` (at least 1) bytes in `frame`; Corrupt if it is not exactly one frame of that many."""
        try:
            says = zstandard.get_frame_parameters(frame)
            if says.content_size != length or says.window_size > max(length, _SMALLEST_WINDOW):
                raise Corrupt(f"a zstd frame of {says.content_size} bytes stands for {length}")
            if says.dict_id or says.has_checksum:
                raise Corrupt("a zstd frame has a dictionary or a checksum")
            plain = self._reader.decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as e:
            raise Corrupt(f"not a zstd frame: {e}") from None
        if len(plain) != length:
            raise Corrupt(f"a zstd frame holds {len(plain)} bytes instead of {length}")
        return plain
