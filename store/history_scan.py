"""Reading a history file back: which frames are whole, what is damaged, where the file ends.

One rule: only what follows the last whole frame is torn and may be cut off. Damage before it is
reported and skipped, because each frame was synced before the next was written: a bad sector
must not take the versions behind it along.

Source: FORMAT.md, "History".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptfs.store.frames import MAGIC, OVERHEAD_BYTES, Frame, decode_frames, mend_frame
from ckptfs.store.history import RecordKind

_KINDS = range(min(RecordKind), max(RecordKind) + 1)


@dataclass(frozen=True, slots=True)
class HistoryScan:
    """What lies behind an offset of a history file; all offsets count from there.

    `frames` are whole and of rising sequence; `end` is where the last of them ends; `damaged` are
    (start, end) ranges before `end` that are no frames. `starts` are where the frames begin, `mended`
    the (start, bytes) of those in which one flipped bit was put right; the file has them wrong.
    """

    frames: list[Frame]
    end: int
    damaged: list[tuple[int, int]]
    starts: list[int] = field(default_factory=list)
    mended: list[tuple[int, bytes]] = field(default_factory=list)


def scan_history(encoded: bytes, sequence: int) -> HistoryScan:
    """The frames in `encoded`, the part of a file that begins behind frame number `sequence`."""
    frames: list[Frame] = []
    damaged: list[tuple[int, int]] = []
    starts: list[int] = []
    mended: list[tuple[int, bytes]] = []
    end = at = 0
    while at >= 0:
        base = at
        for frame in decode_frames(memoryview(encoded)[base:]):
            if frame.sequence <= sequence:
                break
            if at > end or frame.sequence != sequence + 1:
                damaged.append((end, at))
            frames.append(frame)
            starts.append(at)
            sequence = frame.sequence
            end = at = base + frame.end
        right = mend_frame(encoded, end, sequence + 1, _KINDS) if at == end else None
        if right is not None:
            frames.extend(decode_frames(right))
            starts.append(end)
            mended.append((end, right))
            sequence += 1
            end = at = end + len(right)
            continue
        at = encoded.find(MAGIC, at + 1 if at == base else at)
    return HistoryScan(frames, end, damaged, starts, mended)


def whole_batches(scan: HistoryScan) -> HistoryScan:
    """The same without what follows the last seal, and without a last batch that has a gap.

    Records and their seal are one write. Without the seal it did not end, so nobody was told of them;
    and the next seal must not speak for what somebody else may have put there. The sectors of one
    write reach the disk in any order, so after a loss of power the seal may be there without them.
    """
    is_torn = _last_batch_has_a_gap(scan)
    kept = sum(start < scan.damaged[-1][0] for start in scan.starts) if is_torn else len(scan.frames)
    while kept and scan.frames[kept - 1].kind != RecordKind.SEAL:
        kept -= 1
    end = scan.starts[kept - 1] + OVERHEAD_BYTES + len(scan.frames[kept - 1].payload) if kept else 0
    if not is_torn and any(at > end for _, at in scan.damaged):
        return scan
    damaged = [(start, stop) for start, stop in scan.damaged if stop <= end]
    mended = [(at, right) for at, right in scan.mended if at < end]
    return HistoryScan(scan.frames[:kept], end, damaged, scan.starts[:kept], mended)


def _last_batch_has_a_gap(scan: HistoryScan) -> bool:
    """Whether the one seal behind the last damage is the last frame: then both are of one write."""
    if not scan.damaged:
        return False
    gap_end = scan.damaged[-1][1]
    behind = [frame.kind for frame, at in zip(scan.frames, scan.starts, strict=True) if at >= gap_end]
    return behind.count(RecordKind.SEAL) == 1 and behind[-1] == RecordKind.SEAL
