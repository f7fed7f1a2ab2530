"""Retention by policy on a real store: exactly what the policy says stays, whole; the rest is gone."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
from mounting import memory_folder
from saved_store import SavedStore, contents

from ckptfs.daemon import retaining as retaining_module
from ckptfs.daemon.config import UnitPolicy
from ckptfs.daemon.retaining import Policies, Retainer
from ckptfs.store.frames import decode_frames
from ckptfs.store.history import RecordKind, VersionRecord, decode_mark
from ckptfs.store.ids import RecipeId
from ckptfs.store.index import Change, Table
from ckptfs.store.inode import Content, Inode
from ckptfs.store.pins import PinnedFile, encode_pin
from ckptfs.store.sweep import Sweeper
from ckptfs.store.tree import Entry

SAVES, SIZES, EVERY_H = 50, 10, 6
HOUR_NS = 3600 * 10**9
ALL = range(1, SAVES + 1)


class Retaining:
    """A store whose clock is the test's, and what lets its versions go."""

    def __init__(self, root: Path, *policies: UnitPolicy) -> None:
        self.store = one = SavedStore(root)
        self.open: list[RecipeId] = []
        self.sweeper = Sweeper(
            one.disk, one.index, one.segments, one.histories, one.ingest.reclaim, lambda: self.open
        )
        self.retainer = Retainer(one.histories, self.sweeper, Policies(policies), lambda: one.now_ns)

    def stored_bytes(self) -> int:
        """What the segments really occupy."""
        return sum(p.stat().st_blocks * 512 for p in (self.store.root / "segments").rglob("*.seg"))


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_folder() as memory:
        yield memory / "store"


@dataclass(frozen=True, slots=True)
class Case:
    """A policy, and the versions that it keeps of 50 saves, six hours and 100 steps apart."""

    policy: UnitPolicy
    kept: tuple[int, ...]


def case(name: str, kept: set[int] | range, **limits: float) -> object:
    return pytest.param(Case(UnitPolicy(path="/*", **limits), tuple(sorted(kept))), id=name)  # type: ignore[arg-type]


# Save n is version n, of step 100 * n; the last is made at the moment at which all is looked at. Tagged is
# version 5, pinned is version 7. Each save has the two newest checkpoints (save_total_limit=2).
ASKED = {5, 7}


@pytest.mark.parametrize(
    "case",
    [
        case("no limit", ALL),
        case("last 1", {50} | ASKED, keep_last=1),
        case("last 7", {*range(44, 51)} | ASKED, keep_last=7),
        case("last 50", ALL, keep_last=50),
        case("last 99", ALL, keep_last=99),
        case("1 day", {*range(46, 51)} | ASKED, keep_days=1),
        case("quarter of a day", {49, 50} | ASKED, keep_days=0.25),
        case("a year", ALL, keep_days=365),
        case("every 1000th step", {10, 20, 30, 40, 50} | ASKED, keep_every=1000),
        case("every 100th step", ALL, keep_every=100),
        case("every 700th step", {7, 14, 21, 28, 35, 42, 49, 50} | ASKED, keep_every=700),
        case("no such step", {50} | ASKED, keep_every=7_000_000),
        case("last 3 and 2 days", {*range(42, 51)} | ASKED, keep_last=3, keep_days=2),
        case("last 3 and every 2000th", {20, 40, 48, 49, 50} | ASKED, keep_last=3, keep_every=2000),
        case("all three", {15, 30, 45, *range(46, 51)} | ASKED, keep_last=2, keep_days=1, keep_every=1500),
    ],
)
@pytest.mark.parametrize("applied", ["after each save", "at the end"])
def test_what_is_kept_of_50_rotating_saves_is_what_the_policy_says(
    root: Path, rng: random.Random, case: Case, applied: str
) -> None:
    retaining = Retaining(root, case.policy)
    store = retaining.store
    saves: dict[int, dict[bytes, str]] = {}
    sizes: dict[str, int] = {}
    records: dict[int, VersionRecord] = {}

    async def run() -> None:
        window: dict[bytes, dict[bytes, bytes]] = {}
        for number in ALL:
            window[b"checkpoint-%d" % (100 * number)] = checkpoint(rng, number)
            window = dict(list(window.items())[-2:])
            saves[number] = digests(contents(window))
            sizes.update({saves[number][path]: len(content) for path, content in contents(window).items()})
            store.now_ns += EVERY_H * HOUR_NS - 60 * 10**9  # a publish moves the clock by a minute
            records[number] = await store.publish(b"run", window, step=100 * number)
            mark(number)
            if applied == "after each save":
                await retaining.retainer.apply()
        await retaining.retainer.apply()
        await retaining.sweeper.collect()

    def mark(number: int) -> None:
        if number == 5:
            store.histories.tag(records[5].unit, 5, "best")
        if number == 7:
            store.histories.pin(records[7].unit, 7)

    try:
        trio.run(run)
        unit = records[1].unit
        assert tuple(store.histories.numbers(unit)) == case.kept
        assert [n for n in case.kept if digests(store.read_version(records[n])) != saves[n]] == []
        assert buried(root, unit) == {*ALL} - {*case.kept}
        # Every stored chunk is reached: what went took its bytes along.
        assert trio.run(retaining.sweeper.survey).garbage_bytes == 0
        live = {digest for n in case.kept for digest in saves[n].values()}
        assert retaining.stored_bytes() <= 1.1 * sum(sizes[digest] for digest in live) + (1 << 20)
    finally:
        store.close()


def digests(files: dict[bytes, bytes]) -> dict[bytes, str]:
    return {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}


def checkpoint(rng: random.Random, number: int) -> dict[bytes, bytes]:
    """A checkpoint of one of ten sizes."""
    return {b"model.bin": rng.randbytes(20_000 * (1 + number % SIZES)), b"state.json": b"%d" % number}


def buried(root: Path, unit: bytes) -> set[int]:
    """The versions that the history's file says were let go, read without the store's help."""
    frames = decode_frames((root / "history" / f"{unit.hex()}.log").read_bytes())
    found = list(frames)
    assert sum(frame.kind == RecordKind.VERSION for frame in found) == SAVES
    return {decode_mark(frame.payload).number for frame in found if frame.kind == RecordKind.FORGET}


# Versions and bytes by reason of what `filled` makes; each of the contents has 100,000 bytes.
HELD = {
    "live tree": (0, 0),
    "open": (0, 100_000),
    "last complete": (2, 212_000),
    "pinned": (1, 100_000),
    "tag": (1, 100_000),
    "policy": (1, 100_000),
    "version": (2, 200_000),
    "pre-image": (0, 100_000),
}


async def filled(retaining: Retaining, rng: random.Random) -> None:
    """run: six versions, the first tagged, the second pinned, of the third a file is open; other: three.
    A content that nothing else holds is pinned as a pre-image."""
    store = retaining.store
    lost = await store.publish(b"gone", {b"lost": rng.randbytes(100_000)})
    (entry,) = entries_of(store, lost)
    content = Content(base=entry.recipe)
    inode = Inode(0o100644, 0, 0, ((9, b"lost"),), 1, 1, 1, size=100_000, content=content)
    change = Change()
    change.put(Table.PREIMAGE, os.urandom(16), encode_pin(PinnedFile(99, (), b"lost", inode, ())))
    store.index.apply(change)
    store.histories.forget(lost.unit, lost.number)
    records = [
        await store.publish(b"run", {b"model": rng.randbytes(100_000), b"all": b"shared" * 2000})
        for _ in range(6)
    ]
    for _ in range(3):
        await store.publish(b"other", {b"model": rng.randbytes(100_000)})
    store.histories.tag(records[0].unit, 1, "best")
    store.histories.pin(records[0].unit, 2)
    retaining.open += [e.recipe for e in entries_of(store, records[2]) if e.name == b"model" and e.recipe]


def entries_of(store: SavedStore, record: VersionRecord) -> tuple[Entry, ...]:
    assert record.top.tree is not None
    return store.segments.read_tree(record.top.tree)


async def collected(
    retaining: Retaining, *, dry_run: bool
) -> tuple[int, list[int], dict[str, tuple[int, int]]]:
    """(bytes freed, versions of `run` that went, (versions, bytes) by reason) of a `gc`."""
    answer = await retaining.retainer.collect(dry_run)
    assert isinstance(answer, dict) and answer["dry_run"] is dry_run
    forgotten, kept, freed = answer["forgotten"], answer["kept"], answer["freed_bytes"]
    assert isinstance(forgotten, list) and isinstance(kept, dict) and isinstance(freed, int)
    by_reason: dict[str, tuple[int, int]] = {}
    for why, one in kept.items():
        assert isinstance(one, dict)
        by_reason[why] = (int(str(one["versions"])), int(str(one["stored_bytes"])))
    held = sum(stored for _, stored in by_reason.values())
    stored = retaining.store.segments.payload_bytes()
    assert held + (freed if dry_run else 0) == stored, "all that is stored has one reason, or goes"
    numbers = [int(str(one["number"])) for one in forgotten if isinstance(one, dict) and one["unit"] == "run"]
    assert len(numbers) == len(forgotten)
    return freed, numbers, by_reason


def test_gc_says_what_goes_and_what_holds_the_rest(root: Path, rng: random.Random) -> None:
    retaining = Retaining(root, UnitPolicy(path="/run", keep_last=2))
    histories = retaining.store.histories

    def numbers(name: bytes) -> list[int]:
        unit = histories.unit_named(name)
        assert unit is not None
        return histories.numbers(unit.unit)

    async def run() -> None:
        await filled(retaining, rng)
        for dry_run in (True, False):
            freed, forgotten, held = await collected(retaining, dry_run=dry_run)
            assert forgotten == [3, 4]
            assert 100_000 <= freed <= 103_000  # of version 3 the file is open
            assert {why: count for why, (count, _) in held.items()} == {w: c for w, (c, _) in HELD.items()}
            for why, (_, stored) in HELD.items():
                assert stored <= held[why][1] <= stored + 3000, why  # trees and recipes
            assert numbers(b"run") == ([1, 2, 3, 4, 5, 6] if dry_run else [1, 2, 5, 6])
        assert numbers(b"other") == [1, 2, 3]
        assert await collected(retaining, dry_run=False) == (0, [], held)

    try:
        trio.run(run)
    finally:
        retaining.store.close()


def test_versions_come_and_the_background_task_lets_them_go(
    root: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retaining_module, "LOOK_EVERY_S", 0.01)
    retaining = Retaining(root, UnitPolicy(path="/run", keep_last=2))
    store = retaining.store

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(retaining.retainer.run)
            for number in range(1, 6):
                record = await store.publish(b"run", {b"model": rng.randbytes(200_000)})
                with trio.fail_after(20):
                    while store.histories.numbers(record.unit) != [n for n in (number - 1, number) if n]:
                        await trio.sleep(0.01)
            nursery.cancel_scope.cancel()

    try:
        trio.run(run)
    finally:
        store.close()


def test_which_policy_a_unit_has(root: Path) -> None:
    policies = Policies(
        [
            UnitPolicy(path="/scratch*", versions=False),
            UnitPolicy(path="/*", keep_last=3),
            UnitPolicy(path="/run", keep_last=99),
        ]
    )
    first = policies.of(b"run")
    assert first is not None and first.keep_last == 3
    assert policies.of(b"a/b") is None and policies.of(b"@root") is None
    assert [policies.is_off(name) for name in (b"scratch1", b"run", b"a/b")] == [True, False, False]
    assert policies.let_go and not Policies([UnitPolicy(path="/*")]).let_go
