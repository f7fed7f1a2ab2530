"""Payloads that are known to be wanted soon: those that lie side by side are read in one go.

One rule: what is handed out is what a read of that payload alone would give; where a read of several fails,
each is read alone, and says why.

A system call lets go of the GIL, and where others decode it has to be waited for then. What is encoded lies
in the order of the file, and so does what it is encoded against.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ckptfs.store.codecs import new_block
from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import Buffer
from ckptfs.store.segment_files import MAX_OFFSET, SegmentFiles
from ckptfs.store.segment_format import Location

_RUN_BYTES: Final = 2 << 20
_GAP_BYTES: Final = 4096
"""Payloads may begin at a page."""

_Place = tuple[int, bool, int, int]


@dataclass(slots=True)
class _Run:
    """Bytes of one file, from `start` to `end`, in which `left` payloads lie that nobody has asked for yet.
    `payload` are those bytes once they were read."""

    start: int
    end: int
    left: int = 0
    payload: memoryview | None = None


class Neighbours:
    """Owned by one thread, with its `files`. What was read and not asked for yet is kept: a run per file that
    is read in order."""

    def __init__(self, files: SegmentFiles, locations: Iterable[Location]) -> None:
        self._files = files
        self._runs: dict[_Place, _Run] = {}
        places = sorted({_place(one) for one in locations if one.offset <= MAX_OFFSET})
        run, file = _Run(0, -1), (-1, False)
        for place in places:
            segment, in_idx, offset, stored = place
            is_near = 0 <= offset - run.end < _GAP_BYTES and offset + stored - run.start <= _RUN_BYTES
            if file != (segment, in_idx) or not is_near:
                run, file = _Run(offset, offset), (segment, in_idx)
            run.end = offset + stored
            run.left += 1
            self._runs[place] = run

    def payload(self, location: Location) -> Buffer:
        """What is stored at a place, exactly; Corrupt and OSError as `SegmentFiles.pread`."""
        run = self._runs.pop(_place(location), None)
        if run is None or (run.left == 1 and run.payload is None):
            return self._alone(location)
        run.left -= 1
        if run.payload is None:
            payload = new_block(run.end - run.start)[: run.end - run.start]
            try:
                self._files.fill(payload, location.segment, location.in_idx, run.start)
            except Corrupt:
                return self._alone(location)
            run.payload = payload.toreadonly()
        at = location.offset - run.start
        view = run.payload[at : at + location.stored]
        if not run.left:
            run.payload = None
        return view

    def _alone(self, location: Location) -> bytes:
        return self._files.pread(location.segment, location.in_idx, location.stored, location.offset)


def _place(location: Location) -> _Place:
    return location.segment, location.in_idx, location.offset, location.stored
