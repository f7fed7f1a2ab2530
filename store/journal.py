"""The journal: what happened since the index was last committed.

One rule: a record is in the journal before the operation that it stands for is answered; so
what was answered survives the death of the process, and, once synced, the loss of power.

Source: FORMAT.md, "Journal".
"""

from __future__ import annotations

import errno

import msgspec

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, InvalidRequest, NoSpace, Place, ReadOnly
from ckptfs.store.frames import MAGIC, Frame, decode_frames, encode_frame, mend_frame

JOURNAL_PATH = "journal/current"
RESERVE_PATH = "journal/reserve"
RESERVE_BYTES = 8 << 20
ALLOCATED_BYTES = 8 << 20
CHANGE_KIND = 1

Op = tuple[int, bytes, bytes | None]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Op])


class Journal:
    """A file of frames, each a list of (table number, key, value or None), written from its start
    after every commit; sequence numbers tell the new ones from what is left of the old.

    `mended` counts the records of which one flipped bit was put right, `damage` is what `replay` met
    last where a record should have been: damage, because whole records follow. Touched only by the
    index thread.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        disk.make_dir("journal")
        fresh = not disk.exists(JOURNAL_PATH)
        self._fd = disk.create(JOURNAL_PATH) if fresh else disk.open_write(JOURNAL_PATH)
        if fresh:
            disk.sync_dir("journal")
        self._allocated_bytes = disk.set_aside(ALLOCATED_BYTES)
        disk.allocate(self._fd, self._allocated_bytes)
        self._end = 0
        self._synced_end = 0
        self._broken = False
        self.mended = 0
        self.damage: Corrupt | None = None

    def replay(self, after: int) -> list[tuple[int, list[Op]]]:
        """(sequence, operations) of every whole record behind sequence `after`, in order.

        What follows the last of them was never acknowledged, or is older, and is written over.
        Raises InvalidRequest, and changes nothing, if the file begins with a record that does not
        follow on `after`: the journal is then that of another index, such as one that was deleted,
        and a part of it is not a state. (Behind older records such a one is what is left of several
        of which a loss of power took the first.)
        """
        encoded = self._disk.pread(self._fd, self._disk.fstat(self._fd).st_size, 0)
        found: list[tuple[int, list[Op]]] = []
        self._end, self.damage = 0, None
        at, previous = 0, 0
        while (frame := self._next_frame(encoded, at, previous or after)) is not None:
            if previous and frame.sequence != previous + 1:
                break
            if not previous and frame.sequence > after + 1:
                raise InvalidRequest(
                    f"the index of {self._disk.root} is not the one of its journal; "
                    "run `ckptfs rebuild` first"
                )
            at, previous = at + frame.end, frame.sequence
            if frame.sequence > after:
                found.append((frame.sequence, decode_operations(frame.payload)))
                self._end = at
        return found

    def _next_frame(self, encoded: bytes, at: int, previous: int) -> Frame | None:
        """The record at byte `at`, its one flipped bit put right if need be; `end` counts from there."""
        frame = next(decode_frames(memoryview(encoded)[at:]), None)
        if frame is not None:
            return frame
        right = mend_frame(encoded, at, previous + 1, range(CHANGE_KIND, CHANGE_KIND + 1))
        if right is not None:
            self.mended += 1
            return next(decode_frames(right))
        self.damage = self._damage_at(encoded, at, previous)
        return None

    def _damage_at(self, encoded: bytes, at: int, previous: int) -> Corrupt | None:
        """Whether what stands at `at` was a record: then later ones may stand behind it."""
        following = encoded.find(MAGIC, at + 1)
        while following >= 0:
            frame = next(decode_frames(memoryview(encoded)[following:]), None)
            if frame is not None and frame.sequence > previous + 1:
                lost = frame.sequence - previous - 1
                what = f"the journal is damaged: {lost} changes before change {frame.sequence} are lost"
                return Corrupt(what, place=Place(JOURNAL_PATH, at))
            following = encoded.find(MAGIC, following + 1)
        return None

    def check(self) -> Corrupt | None:
        """What is wrong with the records that the next start would replay; None: nothing."""
        encoded = self._disk.pread(self._fd, self._end, 0)
        at, previous = 0, None
        for frame in decode_frames(encoded):
            if previous is not None and frame.sequence != previous + 1:
                break
            at, previous = frame.end, frame.sequence
        if at == len(encoded) == self._end:
            return None
        return Corrupt("a record of the journal is damaged", place=Place(JOURNAL_PATH, at))

    def append(self, sequence: int, operations: list[Op]) -> None:
        """Write one record. Durable when: `sync` returned (a dying process loses nothing)."""
        if self._broken:
            raise ReadOnly("the journal failed to sync before; restart ckptfs")
        encoded = encode_frame(CHANGE_KIND, sequence, encode_operations(operations))
        try:
            self._disk.pwrite(self._fd, encoded, self._end)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.free_reserve():
                raise self._explained(e) from e
            self._write_again(encoded)
        self._end += len(encoded)

    def sync(self) -> None:
        """Make every appended record durable. After a failure nobody knows what is on the disk, whatever
        the next sync says: OSError then, ReadOnly ever after."""
        if self._broken:
            raise ReadOnly("the journal failed to sync before; restart ckptfs")
        if self._synced_end == self._end:
            return
        try:
            self._disk.sync(self._fd)
        except OSError:
            self._broken = True
            raise
        self._synced_end = self._end

    def restart(self) -> None:
        """Forget all records, because the index has committed them.

        They are written over, not cut off: the file keeps its blocks, so that a full disk does not
        stop the next records, and a sync has no change of length to write.
        """
        if self._end > self._allocated_bytes:
            self._disk.truncate(self._fd, self._allocated_bytes)
        self._end = self._synced_end = 0

    def begin_anew(self) -> None:
        """At opening, when all records are committed: cut off what other runs left, so that no old
        frame can ever follow a new one by chance."""
        self._disk.truncate(self._fd, 0)
        self._disk.sync(self._fd)
        self._disk.allocate(self._fd, self._allocated_bytes)
        self._end = self._synced_end = 0

    def size_bytes(self) -> int:
        """Bytes appended since the last restart."""
        return self._end

    def ensure_reserve(self) -> None:
        """Keep some blocks aside, so that removals can still be recorded on a full disk."""
        if self._disk.exists(RESERVE_PATH):
            return
        fd = self._disk.create(RESERVE_PATH)
        try:
            for at in range(0, self._disk.set_aside(RESERVE_BYTES), 1 << 20):
                self._disk.pwrite(fd, bytes(1 << 20), at)
        except OSError:
            self._disk.unlink(RESERVE_PATH)
        finally:
            self._disk.close(fd)

    def free_reserve(self) -> bool:
        """Give the reserve up; False if it is gone already."""
        if not self._disk.exists(RESERVE_PATH):
            return False
        self._disk.unlink(RESERVE_PATH)
        return True

    def close(self) -> None:
        """Close the file."""
        self._disk.close(self._fd)

    def _write_again(self, encoded: bytes) -> None:
        try:
            self._disk.pwrite(self._fd, encoded, self._end)
        except OSError as e:
            raise self._explained(e) from e

    @staticmethod
    def _explained(e: OSError) -> Exception:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            return NoSpace("the disk below the store is full, even for the journal; remove something")
        return e


def encode_operations(operations: list[Op]) -> bytes:
    """The payload of a record."""
    return _encoder.encode(operations)


def decode_operations(payload: bytes) -> list[Op]:
    """The operations in the payload of a record, or Corrupt."""
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as e:
        raise Corrupt(f"a journal record has a good checksum and a bad body: {e}") from None
