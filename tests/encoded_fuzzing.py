"""Encoded segments with everything about them changed: payloads, rows, edges, places, parents.

    python tests/encoded_fuzzing.py --minutes 5 [--seed N]

The one rule: whatever a store says, a reader gets the bytes that were saved or Corrupt (Unsupported, if a
payload says that a later release wrote it), in bounded memory; a scrub and a rebuild come to an end; and when
the saves are written again, every byte is there again. tests/store/test_encoded_fuzz.py does a few rounds.
"""

from __future__ import annotations

import argparse
import random
import shutil
import struct
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import trio
import trio.testing
from encoded_series import Series, located, saves
from small_store import SmallStore, memory_or

from ckptfs.store.bad_chunks import find_bad
from ckptfs.store.encoding_level import Level
from ckptfs.store.errors import Corrupt, Unsupported
from ckptfs.store.hashing import crc64
from ckptfs.store.histories import Histories
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change, Table
from ckptfs.store.layout import Format, encode_format
from ckptfs.store.parent_table import Lineage, encode_lineage
from ckptfs.store.reading_ahead import ReadingAhead
from ckptfs.store.rebuild import rebuild
from ckptfs.store.recovery import recover
from ckptfs.store.scrub import Scrubber
from ckptfs.store.scrub_run import Met
from ckptfs.store.segment_files import read_idx
from ckptfs.store.segment_format import (
    DIFFERENCES,
    MAX_DEPTH,
    Codec,
    Location,
    encode_location,
    segment_paths,
)

MEMORY_BYTES = 48 << 20
_SERIES = saves(5, values=70_000, counters=3000)
_LYING = (0, 1, 7, 0xFFFF, 1 << 24, (1 << 31) - 1, (1 << 32) - 1)
_PARENTS_AT = 12


class Round:
    """One store, changed in a few places drawn from `seed`."""

    def __init__(self, root: Path, series: Series, seed: int) -> None:
        self.store = series.store
        self.root = root
        self.draw = random.Random(seed)
        self.series = series
        self.encoded = [
            (ChunkId(key), located(self.store.segments, ChunkId(key)))
            for key, _ in self.store.index.scan(Table.CHUNK)
            if located(self.store.segments, ChunkId(key)).codec != Codec.RAW
        ]
        self.done: list[str] = []

    def change(self) -> None:
        """Change a few things."""
        for _ in range(self.draw.randint(1, 4)):
            change: Callable[[], None] = self.draw.choice(
                [
                    self._flip,
                    self._cut,
                    self._lie_in_a_payload,
                    self._give_other_parents,
                    self._swap_payloads,
                    self._lie_in_a_place,
                    self._lie_about_parents,
                    self._make_a_loop,
                    self._break_an_idx,
                ]
            )
            self.done.append(change.__name__)
            change()

    # ---- what can be wrong ---------------------------------------------------------------------

    def _one(self, *codecs: Codec) -> tuple[ChunkId, Location]:
        return self.draw.choice([one for one in self.encoded if not codecs or one[1].codec in codecs])

    def _path(self, place: Location, *, idx: bool = False) -> Path:
        return self.root / segment_paths(place.segment)[idx]

    def _payload(self, place: Location) -> bytearray:
        """What lies there; zeros, where the file was cut."""
        content = self._path(place).read_bytes()
        return bytearray(content[place.offset : place.offset + place.stored].ljust(place.stored, b"\0"))

    def _put_payload(self, place: Location, payload: bytes | bytearray, *, seal: bool) -> None:
        sealed = bytearray(payload)
        if seal and len(sealed) >= 8:
            sealed[-8:] = struct.pack("<Q", crc64(sealed[:-8]))
        with self._path(place).open("r+b") as file:
            file.seek(place.offset)
            file.write(sealed)

    def _flip(self) -> None:
        _, place = self._one()
        payload = self._payload(place)
        for _ in range(self.draw.choice([1, 1, 5])):
            payload[self.draw.randrange(len(payload))] ^= 1 << self.draw.randrange(8)
        self._put_payload(place, payload, seal=self.draw.random() < 0.5)

    def _cut(self) -> None:
        path = self._path(self._one()[1], idx=self.draw.random() < 0.2)
        with path.open("r+b") as file:
            file.truncate(self.draw.randrange(path.stat().st_size))

    def _lie_in_a_payload(self) -> None:
        """Header fields, and the lengths of planes behind them."""
        _, place = self._one()
        payload = self._payload(place)
        if self.draw.random() < 0.6:
            at = self.draw.randrange(12)
            payload[at] = self.draw.randrange(256)
            if self.draw.random() < 0.3:
                payload[8:12] = struct.pack("<I", self.draw.choice(_LYING))
        else:
            at = _PARENTS_AT + 32 * payload[6] + 4 * self.draw.randrange(4)
            payload[at : at + 4] = struct.pack("<I", self.draw.choice(_LYING))
        self._put_payload(place, payload[: place.stored], seal=True)

    def _give_other_parents(self) -> None:
        _, place = self._one(*DIFFERENCES, Codec.CAST)
        payload = self._payload(place)
        other, _ = self._one()
        at = _PARENTS_AT + 32 * self.draw.randrange(payload[6])
        payload[at : at + 32] = other if self.draw.random() < 0.7 else self.draw.randbytes(32)
        payload[5] = self.draw.choice([payload[5], 1, MAX_DEPTH])
        self._put_payload(place, payload, seal=True)

    def _swap_payloads(self) -> None:
        (_, one), (_, other) = self._one(), self._one()
        first, second = self._payload(one), self._payload(other)
        self._put_payload(one, second[: len(first)], seal=False)
        self._put_payload(other, first[: len(second)], seal=False)

    def _lie_in_a_place(self) -> None:
        chunk, place = self._one()
        name = self.draw.choice(["segment", "offset", "stored", "length", "codec", "flags"])
        limit = {"codec": 0xFF, "flags": 0xFF, "stored": (1 << 32) - 1, "length": (1 << 32) - 1}.get(name)
        value = self.draw.choice([*_LYING, (1 << 64) - 1, getattr(place, name) + 1])
        fields = {field: getattr(place, field) for field in Location.__struct_fields__}
        fields[name] = value if limit is None else value & limit
        self._put(Table.CHUNK, chunk, encode_location(Location(**fields)))

    def _lie_about_parents(self) -> None:
        child, _ = self._one()
        parents = tuple(self._one()[0] for _ in range(self.draw.randint(1, 2)))
        rows = [encode_lineage(Lineage(self.draw.randint(1, MAX_DEPTH), parents)), bytes(5), None]
        self._put(Table.PARENT, child, self.draw.choice(rows))
        if self.draw.random() < 0.5:
            self._put(Table.CHILD, parents[0] + child, bytes([self.draw.randint(0, 255)]))

    def _make_a_loop(self) -> None:
        """Chunks that lead to each other, in the tables and in what they say themselves."""
        some = [self._one(*DIFFERENCES) for _ in range(self.draw.randint(1, 12))]
        for (child, place), (parent, _) in zip(some, some[1:] + some[:1], strict=True):
            payload = self._payload(place)
            payload[_PARENTS_AT : _PARENTS_AT + 32] = parent
            payload[5] = MAX_DEPTH
            self._put_payload(place, payload, seal=True)
            self._put(Table.PARENT, child, encode_lineage(Lineage(MAX_DEPTH, (parent,))))
            self._put(Table.CHILD, parent + child, bytes([MAX_DEPTH]))

    def _break_an_idx(self) -> None:
        path = self._path(self._one()[1], idx=True)
        content = bytearray(path.read_bytes())
        for _ in range(self.draw.choice([1, 3])):
            content[self.draw.randrange(len(content) - 8)] ^= 1 << self.draw.randrange(8)
        if self.draw.random() < 0.5:
            content[-8:] = struct.pack("<Q", crc64(content[:-8]))
        path.write_bytes(content)

    def _put(self, table: Table, key: bytes, value: bytes | None) -> None:
        change = Change()
        if value is None:
            change.delete(table, key)
        else:
            change.put(table, key, value)
        self.store.index.apply(change)

    # ---- what has to hold ----------------------------------------------------------------------

    def check_reads(self) -> Counter[str]:
        """Every file and every chunk, by all who read."""
        found: Counter[str] = Counter()
        with bounded_memory():
            for number, save in enumerate(self.series.files):
                for path, payload in save.items():
                    found[self._read(number, path, payload)] += 1
            for chunk, place in self.encoded:
                parents = self.store.segments.parents_of([(chunk, place)])
                try:
                    find_bad(self.store.disk, [(chunk, place)], parents)
                except Unsupported:
                    found["unsupported"] += 1
        return found

    def _read(self, number: int, path: str, payload: bytes) -> str:
        request = self.draw.choice([1000, 128 << 10, 1 << 20])
        start = self.draw.randrange(len(payload))
        length = min(request, len(payload) - start)
        try:
            recipe = self.series.recipe(number, path)
            if self.draw.random() < 0.5:
                got = self.store.segments.read_file(recipe, start, length)
            else:
                got = trio.run(self._read_ahead, number, path, start, length)
        except (Corrupt, Unsupported) as e:
            return type(e).__name__
        assert got == payload[start : start + length], f"{path} of save {number} at {start}: other bytes"
        return "right"

    async def _read_ahead(self, number: int, path: str, start: int, length: int) -> bytes:
        segments, recipe = self.store.segments, self.series.recipe(number, path)
        ahead = ReadingAhead(self.store.disk, segments)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ahead.run)
            await trio.testing.wait_all_tasks_blocked()
            with suppress(Corrupt, Unsupported):  # the read below meets it again
                await ahead.prepare(recipe, start, segments.plan_read(recipe, start, length))
            nursery.cancel_scope.cancel()
        return bytes(segments.show(segments.plan_read(recipe, start, length)))

    def check_upkeep(self) -> None:
        """A scrub or a rebuild, what is given back behind it, then the saves once more."""
        with bounded_memory():
            if self.draw.random() < 0.5:
                self._scrub()
            else:
                self._rebuild()
            self.store.reclaim()
        for save in self.series.files:
            for path, payload in save.items():
                self.store.store_bytes(payload, path)
        self._scrub()
        self.store.reclaim()
        self.store.reopen()
        self.series.check()
        self._scrub()

    def _scrub(self) -> None:
        async def uses(wanted: set[ChunkId]) -> dict[ChunkId, Met]:
            return {}

        store = self.store
        histories = Histories(store.disk, store.index)
        scrubber = Scrubber(store.disk, store.index, store.segments, store.ingest.reclaim, histories, uses)
        trio.run(scrubber.run_now)

    def _rebuild(self) -> None:
        store = self.store
        store.close()
        try:
            rebuild(store.disk, boot_id="boot", now_ns=5)
        finally:
            store._open()
        recover(store.disk, store.index, store.staging, store.segments.read_recipe, boot_id="boot", now_ns=6)


@contextmanager
def bounded_memory() -> Iterator[None]:
    """What the block takes at its most is bounded."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= MEMORY_BYTES, f"{peak >> 20} MiB for files of half a megabyte"


@contextmanager
def fuzzed_series(folder: Path, level: Level = "fast") -> Iterator[Series]:
    """A store of its own whose saves are encoded."""
    root = memory_or(folder)
    (root / "format").write_bytes(encode_format(Format()))
    store = SmallStore(root)
    try:
        series = Series(store, _SERIES, level)
        series.encode_all()
        store.reopen()
        assert all(read_idx(store.disk, int(path.stem, 16)).rows for path in root.rglob("*.idx"))
        yield series
    finally:
        store.close()
        shutil.rmtree(root)


def run_round(folder: Path, seed: int) -> tuple[list[str], Counter[str]]:
    """One round; what was changed, and what the readers got. AssertionError names the seed."""
    with fuzzed_series(folder, "small" if seed % 2 else "fast") as series:
        one = Round(series.store.root, series, seed)
        one.change()
        try:
            found = one.check_reads()
            one.check_upkeep()
        except BaseException as e:
            e.add_note(f"seed {seed}: {', '.join(one.done)}")
            raise
    return one.done, found


def main() -> None:
    parser = argparse.ArgumentParser(description="fuzz encoded segments")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="one round, of this seed")
    asked = parser.parse_args()
    if asked.seed is not None:
        print(*run_round(Path("/tmp"), asked.seed))
        return
    until, rounds, seed = time.process_time() + 60 * asked.minutes, 0, time.time_ns() >> 10
    changes: Counter[str] = Counter()
    got: Counter[str] = Counter()
    while time.process_time() < until:
        done, found = run_round(Path("/tmp"), seed + rounds)
        changes.update(done)
        got += found
        rounds += 1
    print(f"{rounds} rounds; {dict(changes)}; reads: {dict(got)}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
