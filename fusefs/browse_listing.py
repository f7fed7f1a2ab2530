"""Which versions a directory of versions lists, and under which other names.

One rule: a symbolic link is listed only if the version that it leads to is, and a version of a
subdirectory only if the subdirectory was there.

Cookies: the number for a version, behind 2^48 a hash of its name for a link. So a listing that
goes on from a cookie neither repeats nor misses a name that stays, whatever comes or goes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from operator import attrgetter
from typing import Protocol

from ckptfs.fusefs.browse_nodes import Base
from ckptfs.fusefs.browse_rights import mode_behind
from ckptfs.store.errors import Corrupt, NotFound
from ckptfs.store.histories import Unit
from ckptfs.store.history import State, VersionRecord
from ckptfs.store.ids import TreeId, UnitId
from ckptfs.store.tree import Entry
from ckptfs.store.version_names import LATEST, LATEST_COMPLETE, number_in_name, step_link, steps_held

_LINK_COOKIES = 1 << 48
_CACHED_LISTINGS = 4
_name_of = attrgetter("name")


class Trees(Protocol):
    """Where saved directories are read from (Segments)."""

    def read_tree(self, identity: TreeId) -> tuple[Entry, ...]:
        """The entries by name; Corrupt or NotFound."""


class VersionSource(Protocol):
    """What is asked of Histories."""

    def unit(self, unit_id: UnitId) -> Unit | None: ...
    def unit_of_ino(self, ino: int) -> Unit | None: ...
    def unit_named(self, name: bytes) -> Unit | None: ...
    def shown_names(self) -> dict[bytes, Unit]: ...
    def has_version(self, unit_id: UnitId, number: int) -> bool: ...
    def version(self, unit_id: UnitId, number: int) -> VersionRecord | None: ...
    def versions(self, unit_id: UnitId) -> list[VersionRecord]: ...
    def newest(self, unit_id: UnitId) -> VersionRecord | None: ...
    def newest_complete(self, unit_id: UnitId) -> VersionRecord | None: ...
    def tags(self, unit_id: UnitId) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True)
class Shown:
    """A row: version `number` as a directory with the attributes of `entry`, or a link to it."""

    cookie: int
    name: bytes
    number: int
    entry: Entry
    time_ns: int
    target: bytes | None


@dataclass(frozen=True, slots=True)
class Listing:
    """What a base lists. `rows` are in the order of cookies; `frames` is the length of the history
    that they come from; `resolved` the shown directory in each tree of the unit."""

    base: Base
    frames: int
    rows: list[Shown]
    steps: dict[int, int]
    resolved: dict[TreeId, Entry | None]

    def behind(self, cookie: int, limit: int) -> list[Shown]:
        """Up to `limit` rows behind a cookie."""
        at = bisect_left(self.rows, cookie + 1, key=attrgetter("cookie"))
        return self.rows[at : at + limit]


def entry_named(entries: tuple[Entry, ...], name: bytes) -> Entry | None:
    """The entry of a name in a sorted directory."""
    at = bisect_left(entries, name, key=_name_of)
    return entries[at] if at < len(entries) and entries[at].name == name else None


class Listings:
    """Answers from the histories, and keeps the last few listings. Belongs to the index thread."""

    def __init__(self, trees: Trees, histories: VersionSource) -> None:
        self._trees = trees
        self._histories = histories
        self._cached: dict[int, Listing] = {}

    def of(self, base: Base) -> Listing:
        """The listing of a base; made anew after any change to the unit's history."""
        cached = self._cached.pop(base.ino, None)
        unit = self._histories.unit(base.unit)
        frames = unit.frames if unit is not None else 0
        if cached is None or (cached.frames, cached.base) != (frames, base):
            known = cached.resolved if cached is not None and cached.base == base else {}
            cached = self._make(base, frames, known)
        self._cached[base.ino] = cached
        if len(self._cached) > _CACHED_LISTINGS:
            del self._cached[next(iter(self._cached))]
        return cached

    def number_of(self, base: Base, name: bytes) -> int | None:
        """The version that a name in a listing means, without making the listing where possible."""
        try:
            text = name.decode()
        except UnicodeDecodeError:
            return None
        if (number := number_in_name(text)) is not None:
            record = self._histories.version(base.unit, number)
            return number if record is not None and record.name == text else None
        if text in (LATEST, LATEST_COMPLETE):
            complete = text == LATEST_COMPLETE
            newest = self._histories.newest_complete if complete else self._histories.newest
            record = newest(base.unit)
            return None if record is None else record.number
        number = self._histories.tags(base.unit).get(text)
        if number is None and text.startswith("step-"):
            links = {step_link(step): number for step, number in self.of(base).steps.items()}
            number = links.get(text)
        return number

    def directory(self, base: Base, number: int) -> Entry | None:
        """The shown directory as version `number` has it; None if it was not there, or no such version."""
        record = self._histories.version(base.unit, number)
        return None if record is None else self._resolve(record.top, base.path)

    def clear(self) -> None:
        """Give the memory back."""
        self._cached.clear()

    def _make(self, base: Base, frames: int, known: Mapping[TreeId, Entry | None]) -> Listing:
        records = self._histories.versions(base.unit)
        resolved: dict[TreeId, Entry | None] = {}
        shown: dict[int, tuple[VersionRecord, Entry]] = {}
        for record in records:
            entry = self._shown(record, base.path, known, resolved)
            if entry is not None:
                shown[record.number] = record, entry
        steps = steps_held(records)
        rows = [Shown(n, r.name.encode(), n, entry, r.time_ns, None) for n, (r, entry) in shown.items()]
        links = _links(records, self._histories.tags(base.unit), steps)
        for name, number in links.items():
            if number in shown:
                record, entry = shown[number]
                target = record.name.encode()
                rows.append(Shown(_link_cookie(name), name.encode(), number, entry, record.time_ns, target))
        rows.sort(key=attrgetter("cookie", "name"))
        return Listing(base, frames, rows, steps, resolved)

    def _shown(
        self,
        record: VersionRecord,
        path: bytes,
        known: Mapping[TreeId, Entry | None],
        resolved: dict[TreeId, Entry | None],
    ) -> Entry | None:
        if not path:
            return record.top
        tree = record.top.tree
        assert tree is not None, "the top of a version is a directory"
        if tree not in resolved:
            try:
                resolved[tree] = known[tree] if tree in known else self._resolve(record.top, path)
            except (Corrupt, NotFound):
                # Looking it up says so; the other versions are to be seen all the same.
                resolved[tree] = None
        return resolved[tree]

    def _resolve(self, top: Entry, path: bytes) -> Entry | None:
        """The directory at `path`, open to nobody who could not reach it through the saved ones above it."""
        entry: Entry | None = top
        above: list[Entry] = []
        for name in path.split(b"/") if path else ():
            if entry is None or entry.tree is None:
                return None
            above.append(entry)
            entry = entry_named(self._trees.read_tree(entry.tree), name)
        if entry is None or not entry.is_dir:
            return None
        return replace(entry, mode=mode_behind(entry.mode, entry.gid, above)) if above else entry


def _links(records: list[VersionRecord], tags: Mapping[str, int], steps: Mapping[int, int]) -> dict[str, int]:
    links = {step_link(step): number for step, number in steps.items()}
    links.update(tags)
    if records:
        links[LATEST] = records[-1].number
    complete = next((r.number for r in reversed(records) if r.state is State.COMPLETE), None)
    if complete is not None:
        links[LATEST_COMPLETE] = complete
    return links


def _link_cookie(name: str) -> int:
    hashed = blake2b(name.encode(), digest_size=8, person=b"ckptfs-cookie").digest()
    return _LINK_COOKIES | int.from_bytes(hashed, "little") & (_LINK_COOKIES - 1)
