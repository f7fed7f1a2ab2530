"""Whether a history is what its writer wrote: the chain, the seals, and a head that was kept elsewhere.

One rule: nothing is believed that a seal by a known key, or the head that was kept, does not speak for;
what is wrong is named by the version that it happened to.

Source: FORMAT.md, "Seals".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ckptfs.store.accepted_keys import Accepted
from ckptfs.store.digests import FileDigests, decode_digests_record
from ckptfs.store.errors import Corrupt
from ckptfs.store.frames import OVERHEAD_BYTES, Frame
from ckptfs.store.hashing import sha3
from ckptfs.store.history import GENESIS, RecordKind, VersionRecord, decode_unit
from ckptfs.store.history_labels import described, span
from ckptfs.store.history_scan import HistoryScan
from ckptfs.store.ids import RecipeId, UnitId
from ckptfs.store.seal import Head, SealRecord, chained, chained_all, decode_seal
from ckptfs.store.signing import PublicKey


class Fault(StrEnum):
    """What can be wrong with a history."""

    ALTERED = "altered"
    REMOVED = "removed"
    REORDERED = "reordered"
    FORKED = "forked"
    UNSIGNED = "unsigned"
    KEY = "key"
    HEAD = "head"
    DAMAGED = "damaged"
    INDEX = "index"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: `number` is the version that it happened to, None if it is no one version."""

    fault: Fault
    number: int | None
    message: str


@dataclass(frozen=True, slots=True)
class CheckedVersion:
    """A version in the order of the file; `key` is the fingerprint of who sealed it, None: nobody did."""

    number: int
    name: str
    key: str | None


@dataclass(slots=True)
class HistoryReport:
    """What a check has found. `head` is what to keep elsewhere; `keys` are the fingerprints in the seals,
    `accepted` those that were accepted at some place;
    `digests` is what the history says of whole files, `sealed_digests` the part of it that a good seal by an
    accepted key speaks for."""

    head: Head
    versions: list[CheckedVersion] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    digests: dict[RecipeId, FileDigests] = field(default_factory=dict)
    sealed_digests: dict[RecipeId, FileDigests] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Link:
    """A record in the chain: the chain value `before` it, its place among the records."""

    frame: Frame
    label: str
    version: VersionRecord | None
    before: bytes
    position: int

    @property
    def number(self) -> int | None:
        return None if self.version is None else self.version.number


def check_history(
    unit: UnitId,
    scan: HistoryScan,
    keys: Sequence[PublicKey],
    expected: Head | None = None,
    retired: Collection[PublicKey] = (),
) -> HistoryReport:
    """Check the frames of a whole history file.

    `keys` are those that may have sealed it, in any order: of one key the rotations are followed, several
    are all that is accepted. Without any, what the first seal names is taken, which shows mistakes but no
    forger. `retired` are those of them with which nothing may end any more. `expected` is a head that was
    kept elsewhere. About 0.4 ms a version.
    """
    foreign = _foreign(unit, scan)
    if foreign is not None:
        return HistoryReport(Head(GENESIS), findings=[foreign])
    walk = _Walk(unit, Accepted(unit, keys, scan.frames), scan)
    for frame in scan.frames:
        walk.take(frame)
    if not scan.frames:
        walk.find(Fault.DAMAGED, None, "the history has no whole record")
    return walk.finish(expected, retired)


def _foreign(unit: UnitId, scan: HistoryScan) -> Finding | None:
    """The finding if the file says that it is another unit's: then nothing in it can be right."""
    try:
        first = next((f for f in scan.frames if f.kind == RecordKind.UNIT), None)
        record = None if first is None else decode_unit(first.payload)
    except Corrupt:
        return None
    if record is None or record.unit == unit:
        return None
    what = f"this is the history of another unit, {record.unit.hex()}: files were exchanged"
    return Finding(Fault.ALTERED, None, what)


class _Walk:
    """Goes through a history once. `_excused`: what does not fit is explained by a finding already."""

    def __init__(self, unit: UnitId, accepted: Accepted, scan: HistoryScan) -> None:
        self._unit = unit
        self._accepted = accepted
        self._last_key: PublicKey | None = None
        self._heads = _heads_in(scan.frames)
        self._damaged = {at: end for at, end in scan.damaged if end > at}
        self._at = 0
        self._report = HistoryReport(Head(GENESIS))
        self._chain = self._pure = GENESIS
        self._pures: list[bytes] = []
        self._good_heads: set[bytes] = set()
        self._pending: list[_Link] = []
        self._unsealed: list[_Link] = []
        self._sequence = 0
        self._newest, self._newest_link = 0, GENESIS
        self._excused = self._has_seal = self._is_cut = False

    def find(self, fault: Fault, number: int | None, message: str) -> None:
        """Note a finding; what follows from it is not told again."""
        self._report.findings.append(Finding(fault, number, message))
        self._excused = True

    def take(self, frame: Frame) -> None:
        """The next frame of the file."""
        if self._at in self._damaged:
            end = self._damaged[self._at]
            lost = f"{end - self._at} bytes of the history, from byte {self._at} on, are no records"
            self.find(Fault.DAMAGED, None, lost)
            self._at, self._is_cut = end, True
        elif frame.sequence != self._sequence + 1:
            lost = span("record", self._sequence + 1, frame.sequence - 1)
            self.find(Fault.REMOVED, None, f"{lost} of the history is missing")
        self._at += OVERHEAD_BYTES + len(frame.payload)
        self._sequence = frame.sequence
        if frame.kind == RecordKind.SEAL:
            self._seal(frame)
        else:
            self._record(frame)

    def finish(self, expected: Head | None, retired: Collection[PublicKey]) -> HistoryReport:
        """The report, once all frames were taken."""
        self._leave(self._pending, is_older=False)
        report = self._report
        report.keys = [key.fingerprint for key in self._accepted.named]
        report.accepted = self._accepted.fingerprints
        if self._last_key in retired:
            what = "the newest records are sealed with a key that was retired: later ones were cut off, or"
            self.find(Fault.KEY, None, f"{what} nothing was recorded since; see `ckptfs keys list`")
        report.head = Head(self._chain, self._newest)
        vouched = 0
        if expected is not None:
            if expected.chain in self._pures:
                vouched = self._pures.index(expected.chain) + 1
            elif expected.chain not in self._good_heads:
                self.find(Fault.HEAD, None, self._without(expected))
        self._report_unsealed(vouched)
        return report

    # ---- records ----------------------------------------------------------------------------

    def _record(self, frame: Frame) -> None:
        label, version = f"record {frame.sequence}", None
        try:
            label, version = described(frame)
        except (Corrupt, ValueError) as e:
            self.find(Fault.ALTERED, None, f"record {frame.sequence} of the history is none: {e}")
        if frame.kind == RecordKind.ROTATE and (wrong := self._accepted.rotate(frame.payload)) is not None:
            self.find(Fault.KEY, None, f"record {frame.sequence} is {label}, and {wrong}")
        if version is not None and version.unit != self._unit:
            self.find(Fault.ALTERED, version.number, f"{label} is that of another unit")
        self._pending.append(_Link(frame, label, version, self._chain, len(self._pures)))
        self._chain = chained(self._chain, frame.kind, frame.payload)
        self._pure = chained(self._pure, frame.kind, frame.payload)
        self._pures.append(self._pure)

    def _leave(self, links: Sequence[_Link], *, is_older: bool) -> None:
        """Records that no seal speaks for; `is_older`: than the first seal, which continues them."""
        for link in links:
            self._place(link, None)
            self._list(link, None)
            if not is_older:
                self._unsealed.append(link)

    def _report_unsealed(self, vouched: int) -> None:
        """One finding for each run of records without a seal that the head kept elsewhere does not cover."""
        run: list[_Link] = []
        for link in [link for link in self._unsealed if link.position >= vouched]:
            if run and link.position != run[-1].position + 1:
                self._report_run(run)
                run = []
            run.append(link)
        if run:
            self._report_run(run)

    def _report_run(self, run: list[_Link]) -> None:
        numbers = [link.number for link in run if link.number is not None]
        if numbers:
            verb = "is" if len(numbers) == 1 else "are"
            message = f"{span('version', numbers[0], numbers[-1])} {verb} not signed"
        else:
            message = f"{', '.join(link.label for link in run[:3])}{' …' if len(run) > 3 else ''}: not signed"
        self.find(Fault.UNSIGNED, numbers[0] if numbers else None, message)

    def _list(self, link: _Link, key: str | None) -> None:
        if link.version is not None:
            self._report.versions.append(CheckedVersion(link.version.number, link.version.name, key))

    # ---- seals ------------------------------------------------------------------------------

    def _seal(self, frame: Frame) -> None:
        pending, self._pending = self._pending, []
        behind = pending[-1].label if pending else f"record {frame.sequence - 1}"
        number = pending[-1].number if pending else None
        try:
            seal = decode_seal(frame.payload)
        except Corrupt:
            self.find(Fault.DAMAGED, number, f"the seal of {behind} is none")
            self._leave(pending, is_older=False)
            return
        rest, covered = pending[: -seal.records], pending[-seal.records :]
        key = self._accepted.key_of(seal.key)
        is_signed = key is not None and seal.is_signed_by(key, self._unit)
        is_fitting = len(covered) == seal.records
        is_fitting = is_fitting and chained_all(seal.before, (link.frame for link in covered)) == seal.head
        is_good = is_signed and is_fitting
        is_older = is_good and not self._has_seal and seal.before == covered[0].before
        self._leave(rest, is_older=is_older)
        self._has_seal = True
        self._judge_key(seal, behind, number, is_signed=is_signed)
        if not is_fitting:
            self._judge_records(covered, behind, is_short=len(covered) < seal.records)
        breaks = is_good and seal.before != covered[0].before and not self._excused
        fingerprint = key.fingerprint if key is not None and is_signed else None
        for link in covered:
            self._place(link, seal if is_good else None, breaks=breaks and link is covered[-1])
            self._list(link, fingerprint)
        if is_good and seal.key in self._accepted:
            self._report.sealed_digests.update(digests_in(link.frame for link in covered))
        if is_signed:
            self._chain = seal.head
        if is_good:
            self._good_heads.add(seal.head)
            self._last_key = key
            self._excused = self._is_cut = False

    def _judge_key(self, seal: SealRecord, behind: str, number: int | None, *, is_signed: bool) -> None:
        """Find what is wrong with a seal itself."""
        named = self._accepted.key_of(seal.key)
        if named is not None and seal.key not in self._accepted:
            what = "a key that was retired before" if self._accepted.is_retired(seal.key) else "another key"
            self.find(Fault.KEY, number, f"{behind} is sealed with {what}, {named.fingerprint}")
        if not is_signed:
            damaged = "" if seal.is_whole(self._unit) else ", and its checksum is wrong too"
            self.find(Fault.ALTERED, number, f"the seal of {behind} is not valid{damaged}")
        elif not seal.is_whole(self._unit):
            self.find(Fault.DAMAGED, number, f"the checksum in the seal of {behind} is wrong")

    def _judge_records(self, covered: list[_Link], behind: str, *, is_short: bool) -> None:
        """Find that records are not those that their seal speaks for."""
        if is_short and not self._is_cut:
            self.find(Fault.REMOVED, None, f"a record that the seal behind {behind} speaks for is missing")
        elif not is_short:
            names = " and ".join(link.label for link in covered)
            self.find(
                Fault.ALTERED, covered[-1].number, f"{names} was altered: its seal is for something else"
            )

    # ---- places in the chain ----------------------------------------------------------------

    def _place(self, link: _Link, seal: SealRecord | None, *, breaks: bool = False) -> None:
        """Whether a record stands behind what it continues.

        `seal` is its own if that is good; `breaks`: that continues something else, and nothing found so far
        explains it.
        """
        is_known = seal is not None and seal.before in self._heads
        version = link.version
        if version is not None:
            self._place_version(link, version, is_known=is_known, breaks=breaks)
        elif breaks:
            self._misplaced(link, is_known=is_known)

    def _place_version(self, link: _Link, version: VersionRecord, *, is_known: bool, breaks: bool) -> None:
        number, newest = version.number, self._newest
        if number <= newest:
            self.find(Fault.REORDERED, number, f"{link.label} stands behind version {newest}")
            return
        if number > newest + 1 and not self._is_cut:
            if breaks and is_known:
                self.find(Fault.REORDERED, number, f"{link.label} stands in front of what it continues")
            else:
                missing = span("version", newest + 1, number - 1)
                self.find(Fault.REMOVED, newest + 1, f"{missing} is missing in front of {link.label}")
        elif version.before != self._newest_link and not self._excused and not (breaks and is_known):
            what = f"{link.label} continues another version {newest} than the one in front of it"
            self.find(Fault.FORKED, number, what)
        elif breaks and not is_known:
            self._misplaced(link, is_known=False)
        self._newest = number
        self._newest_link = sha3(version.before + link.frame.payload)

    def _misplaced(self, link: _Link, *, is_known: bool) -> None:
        if is_known:
            self.find(Fault.REORDERED, link.number, f"{link.label} does not stand where it was written")
        else:
            what = f"a tag, pin, name, forgetting or digest in front of {link.label} is missing"
            self.find(Fault.REMOVED, link.number, what)

    def _without(self, expected: Head) -> str:
        kept = "the head that was kept" if expected.number is None else f"the head that was kept ({expected})"
        if expected.number is not None and expected.number > self._newest:
            return (
                f"{kept} is of version {expected.number}, but the history ends with {self._newest}: "
                "its end was cut off, or an old store was put back"
            )
        return (
            f"{kept} is not in this history: something before it was changed, "
            "its end was cut off, or it is another history"
        )


def digests_in(frames: Iterable[Frame]) -> dict[RecipeId, FileDigests]:
    """What DIGESTS records say; one that cannot be decoded is a finding of its own."""
    said: dict[RecipeId, FileDigests] = {}
    for frame in frames:
        if frame.kind == RecordKind.DIGESTS:
            try:
                said.update(decode_digests_record(frame.payload).contents)
            except Corrupt:
                continue
    return said


def _heads_in(frames: Sequence[Frame]) -> set[bytes]:
    heads = {GENESIS}
    for frame in frames:
        if frame.kind == RecordKind.SEAL:
            try:
                heads.add(decode_seal(frame.payload).head)
            except Corrupt:
                pass
    return heads
