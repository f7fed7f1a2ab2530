"""A store in a folder, without a mount: what the tests of ingest and segments work with.

The one rule: what it knows of a file's bytes comes from the test, never from the store.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from ckptfs.store.disk import Disk
from ckptfs.store.index import Change, Index
from ckptfs.store.ingest import Candidate, Ingest, Ingested, IngestReport
from ckptfs.store.segments import Segments
from ckptfs.store.spans import SpanCutter
from ckptfs.store.staging import Staging

BLOCK_BYTES = 4096
DAY_NS = 24 * 3600 * 10**9


class SmallStore:
    """Disk, index, segments, staging and ingest over `root`; `now_ns` is set by the test."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = root
        self.now_ns = 1_000 * DAY_NS
        self._cutter: SpanCutter | None = None
        self.disk = disk if disk is not None else Disk(str(root))
        self._open()

    def _open(self) -> None:
        self.index = Index(self.disk)
        self.segments = Segments(self.disk, self.index)
        self.staging = Staging(self.disk, 1)
        self.ingest = Ingest(
            self.disk,
            self.index,
            self.segments,
            self.staging,
            now_ns=lambda: self.now_ns,
            cutter=self._cutter,
        )

    def cut_with(self, cutter: SpanCutter) -> None:
        """Large files are cut by `cutter` from now on."""
        self._cutter = cutter
        self.reopen()

    def reopen(self) -> None:
        """As after a restart of the daemon: nothing is known to be verified."""
        self.close()
        self._open()

    def close(self) -> None:
        """Commit and close."""
        self.segments.close()
        self.index.close()

    def stage(self, *extents: tuple[int, bytes], size: int | None = None) -> int:
        """The number of a staging file that holds `extents` and, up to `size`, holes."""
        number, fd = self.staging.create()
        try:
            for offset, payload in extents:
                self.disk.pwrite(fd, payload, offset)
            if size is not None:
                self.disk.truncate(fd, size)
        finally:
            self.disk.close(fd)
        return number

    def candidate(
        self,
        number: int,
        *,
        name: str = "file.bin",
        base: Ingested | None = None,
        base_limit: int | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Candidate:
        """A candidate whose key is its staging number."""
        size = self.disk.size(f"staging/{number:016x}")
        limit = 0 if base is None else base.size if base_limit is None else base_limit
        recipe = base.recipe if base is not None else None
        return Candidate(number, number, size, name, recipe, limit, None, cancelled)

    def store(
        self, *candidates: Candidate, commit: Callable[[Change, list[Ingested]], list[object]] | None = None
    ) -> IngestReport:
        """Run the ingest of `candidates`."""
        return trio.run(self.ingest.store_files, candidates, commit if commit is not None else keep_all)

    def store_bytes(self, payload: bytes, name: str = "file.bin") -> Ingested:
        """Store a new plain file of these bytes."""
        report = self.store(self.candidate(self.stage((0, payload), size=len(payload)), name=name))
        assert len(report.stored) == 1, report
        return report.stored[0]

    def read(self, stored: Ingested, request_bytes: int = 1 << 20) -> bytes:
        """All bytes of a stored file, read in requests of one size."""
        recipe = self.segments.read_recipe(stored.recipe)
        offsets: Sequence[int] = range(0, recipe.size, request_bytes)
        return b"".join(self.segments.read_file(recipe, at, request_bytes) for at in offsets)

    def reclaim(self) -> int:
        """Commit, then give back what can be given back; the bytes."""
        self.index.commit()
        return trio.run(self.ingest.reclaim.execute)

    def segment_files(self) -> list[Path]:
        """Every file below segments/, sorted."""
        return sorted(path for path in (self.root / "segments").rglob("*") if path.is_file())

    def occupied_bytes(self) -> int:
        """Bytes that the payload files really occupy."""
        return sum(p.stat().st_blocks * 512 for p in self.segment_files() if p.suffix == ".seg")


def keep_all(change: Change, stored: list[Ingested]) -> list[object]:
    """A commit callback to which nothing has changed meanwhile."""
    return []


class CountingDisk(Disk):
    """Counts the bytes that are read and written."""

    bytes_read = 0
    bytes_written = 0

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        found = super().pread(fd, length, offset)
        self.bytes_read += len(found)
        return found

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        n = super().read_into(fd, buffer, offset)
        self.bytes_read += n
        return n

    def pwrite(self, fd: int, payload: bytes | bytearray | memoryview, offset: int) -> int:
        self.bytes_written += len(payload)
        return super().pwrite(fd, payload, offset)


def memory_or(path: Path) -> Path:
    """A fresh folder in memory, where there is one."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(path)
    return Path(tempfile.mkdtemp(prefix="ckptfs-test-", dir=parent))


def random_bytes(length: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(length)


def safetensors(tensors: dict[str, bytes]) -> bytes:
    """A safetensors file of F32 vectors."""
    header, at = {}, 0
    for name, payload in tensors.items():
        shape = [len(payload) // 4]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(payload)]}
        at += len(payload)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + b"".join(tensors.values())


def segment_of(store: SmallStore, stored: Ingested) -> int:
    """The segment of the file's first chunk."""
    location = store.segments.locate(next(store.segments.read_recipe(stored.recipe).chunks()))
    assert location is not None
    return location.segment
