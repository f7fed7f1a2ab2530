"""What a remote says of a unit: its history, checked, and the versions that can be fetched.

One rule: a version is what its history says, behind the seals; the head only says which of them are copied.

Source: FORMAT.md, "Remotes", "Fetching" and "What is trusted".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptfs.store.errors import Corrupt
from ckptfs.store.history import RecordKind, VersionRecord, decode_mark, decode_unit, decode_version
from ckptfs.store.history_check import HistoryReport, check_history
from ckptfs.store.history_scan import HistoryScan, scan_history
from ckptfs.store.remote.head import RemoteHead
from ckptfs.store.remote.names import piece_key
from ckptfs.store.remote.objects import Remote
from ckptfs.store.signing import PublicKey


@dataclass(frozen=True, slots=True)
class RemoteUnit:
    """A unit as a remote has it: `versions` are those that are copied, oldest first, `tags` and `pins` those
    of all; `name` is that of its last UNIT or RENAME record."""

    head: RemoteHead
    name: bytes
    scan: HistoryScan
    versions: tuple[VersionRecord, ...]
    tags: dict[str, int]
    pins: frozenset[int] = frozenset()

    def check(self, keys: Sequence[PublicKey]) -> HistoryReport:
        """Check the history, as `ckptfs log --verify` does; see check_history."""
        return check_history(self.head.unit, self.scan, keys)

    def doubt_of(self, report: HistoryReport, record: VersionRecord, keys: Sequence[PublicKey]) -> str | None:
        """Why a version must not be fetched, going by the report of `check`; None: nothing is against it.

        Without keys a history that nobody has sealed is taken as it is.
        """
        wrong = [one for one in report.findings if one.number in (None, record.number)]
        signer = next((one.key for one in report.versions if one.number == record.number), None)
        if not keys and not report.keys:
            wrong = [one for one in wrong if one.fault != "unsigned"]
        elif signer not in report.accepted:
            return f"version {record.number} is not signed with a key that is accepted"
        return wrong[0].message if wrong else None


async def read_history(remote: Remote, head: RemoteHead) -> bytes:
    """The history file that a head leads to. NotFound or Corrupt, naming the piece, if it cannot be had."""
    parts = []
    for piece in head.pieces:
        content = await remote.get(piece_key(head.unit, piece.name), piece.name)
        if len(content) != piece.size:
            raise Corrupt(f"a piece of the history of {head.unit.hex()} at {remote.url} has another length")
        parts.append(content)
    return b"".join(parts)


async def read_unit(remote: Remote, head: RemoteHead) -> RemoteUnit:
    """What a head leads to; as read_history raises."""
    return unit_of_history(head, await read_history(remote, head))


def unit_of_history(head: RemoteHead, encoded: bytes) -> RemoteUnit:
    """The same of a history that was read; records that are none are left out (a check names them)."""
    scan = scan_history(encoded, 0)
    versions: dict[int, VersionRecord] = {}
    tags: dict[str, int] = {}
    pins: set[int] = set()
    name, copied = head.name, frozenset(head.versions)
    for frame in scan.frames:
        try:
            if frame.kind == RecordKind.VERSION:
                record = decode_version(frame.payload)
                if record.number in copied and record.unit == head.unit:
                    versions[record.number] = record
            elif frame.kind in (RecordKind.UNIT, RecordKind.RENAME):
                name = decode_unit(frame.payload).name
            elif frame.kind == RecordKind.TAG:
                mark = decode_mark(frame.payload)
                tags[mark.name] = mark.number
            elif frame.kind == RecordKind.UNTAG:
                tags.pop(decode_mark(frame.payload).name, None)
            elif frame.kind == RecordKind.PIN:
                pins.add(decode_mark(frame.payload).number)
            elif frame.kind == RecordKind.UNPIN:
                pins.discard(decode_mark(frame.payload).number)
        except Corrupt:
            continue
    ordered = tuple(versions[number] for number in sorted(versions))
    return RemoteUnit(head, name, scan, ordered, tags, frozenset(pins))
