"""Writing an encoded segment: payloads one behind the other, read back before anything relies on them.

One rule: when `seal` returned, every payload was read from the disk again and decoded to its chunk, and
nothing refers to the segment yet.

Source: FORMAT.md, "Encoded segments", write order, steps 2 and 3. Blocking, for a worker.
"""

from __future__ import annotations

from ckptfs.store.chunk_files import ChunkFiles, Locate
from ckptfs.store.codecs import Encoded
from ckptfs.store.disk import Disk
from ckptfs.store.ids import ChunkId
from ckptfs.store.packing import (
    Built,
    full_disk_is_no_space,
    make_segment_dir,
    remove_segment_files,
    write_idx,
)
from ckptfs.store.segment_files import SegmentFiles
from ckptfs.store.segment_format import (
    BLOCK_BYTES,
    Location,
    Row,
    SegmentIndex,
    SegmentKind,
    encode_idx,
    segment_paths,
)


class EncodedWriter:
    """Writes one encoded segment. The file is made at the first append; one thread at a time."""

    def __init__(self, disk: Disk, number: int, created_ns: int) -> None:
        self._disk = disk
        self._created_ns = created_ns
        self._fd = -1
        self._rows: dict[ChunkId, Row] = {}
        self.number = number
        self.payload_bytes = 0

    def depth(self, chunk: ChunkId) -> int | None:
        """The depth of a chunk that was appended; None for others."""
        row = self._rows.get(chunk)
        return None if row is None else row.depth

    @property
    def occupied_bytes(self) -> int:
        """The room that the segment takes: its two files, each in whole blocks."""
        return _in_blocks(self.payload_bytes) + _in_blocks(len(encode_idx(self._index())))

    def append(self, chunk: ChunkId, length: int, encoded: Encoded) -> None:
        """Write what stands for a chunk of `length` bytes behind the ones before; each chunk once.

        Durable when: `seal` returned. Raises NoSpace; the caller then discards the segment.
        """
        assert chunk not in self._rows, "the chunks of one segment are distinct"
        with full_disk_is_no_space():
            if self._fd < 0:
                make_segment_dir(self._disk, self.number)
                self._fd = self._disk.create(segment_paths(self.number)[0])
            self._disk.pwrite(self._fd, encoded.stored, self.payload_bytes)
        stored = len(encoded.stored)
        self._rows[chunk] = Row(
            chunk, self.payload_bytes, stored, length, encoded.codec, 0, encoded.depth, encoded.parents
        )
        self.payload_bytes += stored

    def seal(self, locate: Locate) -> Built:
        """Sync the payloads, read all of them back, write and sync the `.idx`.

        `locate` is for the chunks that these are encoded against, as in ChunkFiles. Corrupt: the
        disk did not keep what was written; the caller discards the segment. Durable when: this returned.
        """
        assert self._rows, "an empty segment is not sealed"
        index = self._index()
        with full_disk_is_no_space():
            self._disk.sync(self._fd)
            self._disk.drop_cached(self._fd)
            self._close()
            self._read_back(locate)
            write_idx(self._disk, index)
        return Built(index)

    def discard(self) -> None:
        """Remove what was written."""
        self._close()
        remove_segment_files(self._disk, self.number)

    def _read_back(self, locate: Locate) -> None:
        """Decode each chunk from what is stored, and nothing that is remembered: a chain that leads nowhere,
        or to itself, must show here."""

        def located(chunk: ChunkId) -> Location | None:
            row = self._rows.get(chunk)
            return locate(chunk) if row is None else row.location(self.number)

        files = SegmentFiles(self._disk)
        chunks = ChunkFiles(files, located)
        try:
            for row in self._rows.values():
                chunks.read(row.chunk, row.location(self.number))
        finally:
            files.close()

    def _index(self) -> SegmentIndex:
        rows = tuple(self._rows.values())
        return SegmentIndex(self.number, SegmentKind.ENCODED, self._created_ns, self.payload_bytes, rows)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._disk.close(fd)


def _in_blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
