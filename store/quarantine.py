"""What happens when a stored chunk turns out to be wrong: its segment is kept as a copy, and distrusted.

One rule: the segment itself stays where it is, because its other chunks are good and are read on. The
copy is for a person or a tool to look at, is made once per segment, and never fills the disk.

Source: FORMAT.md, "Quarantine".
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio
from msgspec.structs import replace

from ckptfs.store.disk import BLOCK_BYTES, Disk
from ckptfs.store.errors import CkptfsError
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.recovery import QUARANTINE_PATH
from ckptfs.store.segment_format import encode_facts, segment_key, segment_paths
from ckptfs.store.segments import Segments

log = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.5
_COPY_BYTES = 4 << 20
_KEPT_FREE_SHARE = 20


class Quarantine:
    """Keeps copies of damaged segments. Belongs to the index thread; copying is done in a worker.

    `min_free_bytes()` is the room on the disk that a copy must leave.
    """

    def __init__(
        self, disk: Disk, index: Index, segments: Segments, min_free_bytes: Callable[[], int]
    ) -> None:
        self._disk = disk
        self._index = index
        self._segments = segments
        self._min_free_bytes = min_free_bytes

    async def run(self) -> None:
        """Take care of damage as it is met, for ever; cancelled at shutdown."""
        while True:
            await self.execute()
            await trio.sleep(_LOOK_EVERY_S)

    async def execute(self) -> None:
        """Distrust and copy every segment in which a wrong chunk was met since the last call.

        A segment that there is no room for, or that cannot be copied, is told in the log and left.
        Durable when: this returned (the copies).
        """
        for segment in sorted(self._segments.damaged):
            self._distrust(segment)
            try:
                copied = await trio.to_thread.run_sync(
                    keep_copy, self._disk, segment, self._min_free_bytes(), abandon_on_cancel=True
                )
            except OSError as e:
                log.error("segment %016x could not be copied to quarantine: %s", segment, e)
                self._segments.damaged.discard(segment)
                continue
            # Only now: whoever goes on after a kill still has to make the copy.
            self._segments.damaged.discard(segment)
            if copied is None:
                log.error("segment %016x is damaged; the disk is too full for a copy of it", segment)
            elif copied:
                log.error("segment %016x is damaged; a copy of it is in quarantine", segment)

    def _distrust(self, segment: int) -> None:
        """Every dedup hit in it is hashed from now on, in later mounts too."""
        facts = self._segments.facts(segment)
        if facts is None or not facts.verified_ns:
            return
        change = Change()
        change.put(Table.SEGMENT, segment_key(segment), encode_facts(replace(facts, verified_ns=0)))
        try:
            self._index.apply(change)
        except CkptfsError as e:
            log.error("that segment %016x is damaged could not be noted: %s", segment, e)


def keep_copy(disk: Disk, segment: int, min_free_bytes: int) -> bool | None:
    """Copy a segment's files to quarantine/, as far as they can be read; any thread may call.

    True: done. False: it was done before, or the segment is gone. None: it would leave less than
    `min_free_bytes`, or a twentieth of the disk. Durable when: this returned.
    """
    paths = [path for path in segment_paths(segment) if disk.exists(path)]
    kept = {path: f"{QUARANTINE_PATH}/{path.rpartition('/')[2]}" for path in paths}
    if not paths or all(disk.exists(copy) for copy in kept.values()):
        return False
    needed = sum(disk.allocated(path) for path in paths)
    space = disk.space()
    if space.available - needed < max(min_free_bytes, space.total // _KEPT_FREE_SHARE):
        return None
    disk.make_dir(QUARANTINE_PATH)
    for path, copy in kept.items():
        if not disk.exists(copy):
            _copy(disk, path, copy)
    disk.sync_dir(QUARANTINE_PATH)
    return True


def _copy(disk: Disk, path: str, copy: str) -> None:
    """Holes stay holes, and so do blocks that the disk does not give."""
    temporary = copy + ".tmp"
    if disk.exists(temporary):
        disk.unlink(temporary)
    source = disk.open_read(path)
    try:
        target = disk.create(temporary)
        try:
            size = disk.fstat(source).st_size
            disk.truncate(target, size)
            for offset, length in disk.data_extents(source, size):
                for at in range(offset, offset + length, _COPY_BYTES):
                    _copy_range(disk, source, target, at, min(_COPY_BYTES, offset + length - at))
            disk.sync(target)
        except OSError:
            disk.unlink(temporary)
            raise
        finally:
            disk.close(target)
    finally:
        disk.close(source)
    disk.rename(temporary, copy)


def _copy_range(disk: Disk, source: int, target: int, at: int, length: int) -> None:
    try:
        part = disk.pread(source, length, at)
    except OSError:
        part = None
    if part is not None:
        disk.pwrite(target, part, at)
        return
    if length <= BLOCK_BYTES:
        return
    for start in range(at, at + length, BLOCK_BYTES):
        _copy_range(disk, source, target, start, min(BLOCK_BYTES, at + length - start))
