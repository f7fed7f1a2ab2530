"""One batch of a re-encoding: read, encode, decode, write, read back. Without an index: in any process.

One rule: nothing is changed but one new segment, to which nothing refers yet; a chunk that cannot be read, or
that nothing makes smaller, stays where it is, and so do all if the disk would not have more room afterwards.

Source: FORMAT.md, "Encoded segments", write order, steps 1 to 3.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ckptfs.store.chunk_files import ChunkFiles
from ckptfs.store.codecs import MAX_DEPTH, Coder, Encoded, Parent, Stored, decode_chunk, encode
from ckptfs.store.disk import Disk
from ckptfs.store.encoded_writer import EncodedWriter
from ckptfs.store.encoding_level import Level
from ckptfs.store.errors import Corrupt, Unsupported
from ckptfs.store.ids import ChunkId
from ckptfs.store.packing import Built
from ckptfs.store.segment_files import SegmentFiles
from ckptfs.store.segment_format import BLOCK_BYTES, Codec, Location

_LEAST_GAIN = 0.03


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """A raw chunk that is to be encoded: where it lies, the dtype of its values, what it may be encoded
    against, and at which depth at most."""

    chunk: ChunkId
    location: Location
    dtype: str | None = None
    parent: ChunkId | None = None
    cast_of: tuple[ChunkId, ...] = ()
    most_depth: int = MAX_DEPTH


class EncodingBatch(msgspec.Struct, frozen=True, array_like=True):
    """The chunks of one new segment. `places` are those of all that may be parents, and of what they lead
    to; `depths` those of the encoded ones among them."""

    number: int
    created_ns: int
    wanted: tuple[Wanted, ...]
    places: dict[ChunkId, Location]
    depths: dict[ChunkId, int]
    level: Level = "fast"


def encode_batch(disk: Disk, batch: EncodingBatch) -> Built | None:
    """Write the segment of a batch; None if it saves no room, and then there is none.

    Raises NoSpace, OSError, or Corrupt if the disk does not keep what is written; then there is none either.
    Memory: the plain bytes of a batch's parents. Durable when: this returned.
    """
    files = SegmentFiles(disk)
    writer = EncodedWriter(disk, batch.number, batch.created_ns)
    work = _Work(files, writer, batch)
    try:
        for one in batch.wanted:
            work.encode(one)
        if not writer.payload_bytes:
            return None
        if freed_bytes(work.replaced) <= writer.occupied_bytes:
            writer.discard()
            return None
        return writer.seal(batch.places.get)
    except BaseException:
        writer.discard()
        raise
    finally:
        files.close()


def freed_bytes(places: Iterable[Location]) -> int:
    """How much room these payloads leave, at least: the whole blocks that no other touches."""
    freed, segment, start, end = 0, -1, 0, 0

    def whole_blocks() -> int:
        return max(0, end // BLOCK_BYTES - -(-start // BLOCK_BYTES)) * BLOCK_BYTES

    for place in sorted(places, key=lambda one: (one.segment, one.offset)):
        if (place.segment, place.offset) != (segment, end):
            freed += whole_blocks()
            segment, start = place.segment, place.offset
        end = place.offset + place.stored
    return freed + whole_blocks()


def _is_worth_it(length: int, stored: int) -> bool:
    """Decoding is slower than reading: not for less than a block, or a few percent of what is smaller."""
    return length - stored >= min(BLOCK_BYTES, _LEAST_GAIN * length)


class _Work:
    """One batch under way. `plain` are the bytes of parents, each verified; `replaced` the places of what was
    encoded."""

    def __init__(self, files: SegmentFiles, writer: EncodedWriter, batch: EncodingBatch) -> None:
        self.plain: dict[ChunkId, bytes] = {}
        self.replaced: list[Location] = []
        self._chunks = ChunkFiles(files, batch.places.get, self.plain.get)
        self._coder = Coder()
        self._writer = writer
        self._batch = batch
        self._child_depths: dict[ChunkId, int] = {}

    def encode(self, one: Wanted) -> None:
        """Encode a chunk and append it, if that makes it smaller."""
        try:
            payload = self._chunks.read(one.chunk, one.location)
        except (Corrupt, Unsupported):
            return  # A reader or a scrub will say so; there may be nothing better than what lies there.
        parent = None if one.parent is None else self._parent(one.parent, one)
        casts = [found for chunk in one.cast_of if (found := self._parent(chunk, one)) is not None]
        cast_of = casts if len(casts) == len(one.cast_of) else []
        encoded = encode(payload, one.dtype, parent, cast_of, self._coder, self._batch.level)
        if encoded.codec is Codec.RAW or not _is_worth_it(len(payload), len(encoded.stored)):
            return
        if encoded.depth < self._child_depths.get(one.chunk, MAX_DEPTH + 1):
            self._decode(one, encoded)
            for chunk in encoded.parents:
                self._child_depths[chunk] = min(encoded.depth, self._child_depths.get(chunk, MAX_DEPTH))
            self._writer.append(one.chunk, len(payload), encoded)
            self.replaced.append(one.location)

    def _parent(self, chunk: ChunkId, child: Wanted) -> Parent | None:
        """A chunk to encode against; None if it cannot be read, or leads too deep."""
        depth = self._writer.depth(chunk)
        if depth is None:
            depth = self._batch.depths.get(chunk, 0)
        place = self._batch.places.get(chunk)
        if place is None or depth >= child.most_depth:
            return None
        plain = self.plain.get(chunk)
        if plain is None:
            try:
                plain = self.plain[chunk] = self._chunks.read(chunk, place)
            except (Corrupt, Unsupported):
                return None
        return Parent(chunk, plain, depth)

    def _decode(self, one: Wanted, encoded: Encoded) -> None:
        """Corrupt unless what was encoded decodes to the chunk."""

        def fetch(chunk: ChunkId) -> Stored:
            if chunk == one.chunk:
                return Stored(encoded.codec, one.location.length, encoded.stored)
            plain = self.plain[chunk]
            return Stored(Codec.RAW, len(plain), plain)

        decode_chunk(one.chunk, fetch, self._coder)
