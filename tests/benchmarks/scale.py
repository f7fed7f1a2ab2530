"""What ten million chunks cost: start, memory, ingest, and each operation of the index as it grows.

    ./dev bench --only scale [--chunks 10000000] [--rounds 9]

The index is grown in one store, in memory, and each operation is measured whenever it has ten times as many
chunks as before; then a daemon is started on it, and beside it one on an empty store. large_index.py says
what of the store is real and what is not.

One rule: the large store and the empty one are measured in turn, in one run; the operations in CPU time,
which is theirs alone whatever else runs (the store is in memory, so there is nothing to wait for).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from statistics import median

import trio
from ingest import publish_now
from large_index import CHUNK_BYTES, UNIT, LargeIndex
from mounting import Mount
from places import Asked, Place, ckptfs
from report import Figure
from small_face import SmallFace, small_face
from small_store import safetensors

from ckptfs.daemon.saved_files import Saved
from ckptfs.daemon.usage import UsageCount
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.segment_format import Location, encode_location
from ckptfs.store.sweep import Sweeper

START_S, RSS_MIB, RATE = 2.0, 350, 0.8
SMALLEST = 10_000
LOOKUPS = 2_000
A_SECOND = 4_000
"""Chunks that come between two commits: a second of 1 GB/s."""
_GROWS = 2.0
"""What costs at most this times as much at ten times the chunks grows with their logarithm, and with what the
processor's caches no longer hold. Below a million they hold most of it, and a commit writes all of it."""
_FROM = 1_000_000
_QUIET_S, _QUIET_LIMIT_S = 1.0, 300.0
_LOOK_EVERY_S = 0.02
_INGEST_MIB, _INGESTS = 256, 3
_MIB = 1 << 20


def figures(asked: Asked) -> Iterator[Figure]:
    """All of them, as they come."""
    store = asked.folder / "large" / "store"
    store.parent.mkdir(parents=True)
    with small_face(store) as small:
        yield from _operations(small, asked.chunks, asked.rounds)
    yield from _daemons(asked)


def _operations(small: SmallFace, most: int, rounds: int) -> Iterator[Figure]:
    large = LargeIndex(small)
    before: dict[str, Figure] = {}
    size = min(SMALLEST, most)
    while size <= most:
        large.grow(size)
        for figure in _at_size(small, large, rounds):
            figure.place = f"{size:,} chunks"
            if size > _FROM:
                figure.goal, figure.in_seconds = _GROWS * median(before[figure.name].seconds), True
            before[figure.name] = figure
            yield figure
        size *= 10


def _at_size(small: SmallFace, large: LargeIndex, rounds: int) -> list[Figure]:
    index, chance = small.parts.index, random.Random(2)

    def lookup_us(ids: list[ChunkId]) -> float:
        began = time.process_time()
        for one in ids:
            index.get(Table.CHUNK, one)
        return (time.process_time() - began) / len(ids) * 1e6

    hits = [lookup_us(chance.choices(large.known, k=LOOKUPS)) for _ in range(rounds)]
    misses = [lookup_us([*large.new_ids(LOOKUPS)]) for _ in range(rounds)]
    inserts, commits = _insert_and_commit(large, index, rounds)
    count = index.count(Table.CHUNK)
    surveys = [_survey_s(small) / count * 1e6 for _ in range(rounds if count < 10**6 else 1)]
    return [
        Figure("lookup, hit", "", hits, unit="µs"),
        Figure("lookup, miss", "", misses, unit="µs"),
        Figure("insert", "", inserts, unit="µs"),
        Figure(f"commit of {A_SECOND:,} inserts", "", commits, unit="ms"),
        Figure("gc: mark and count, per chunk", "", surveys, unit="µs"),
        Figure("du of the first version", "", [_du_ms(small) for _ in range(rounds)], unit="ms"),
    ]


def _insert_and_commit(large: LargeIndex, index: Index, rounds: int) -> tuple[list[float], list[float]]:
    """(µs a chunk, ms a commit); what was inserted is taken out again."""
    inserts, commits, inserted = [], [], []
    for _ in range(rounds):
        ids = [*large.new_ids(A_SECOND)]
        change = Change()
        for at, one in enumerate(ids):
            location = Location(1, at * CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES)
            change.put(Table.CHUNK, one, encode_location(location))
        began = time.process_time()
        index.apply(change)
        inserts.append((time.process_time() - began) / len(ids) * 1e6)
        began = time.process_time()
        index.commit()
        commits.append((time.process_time() - began) * 1e3)
        inserted += ids
    change = Change()
    for one in inserted:
        change.delete(Table.CHUNK, one)
    index.apply(change)
    index.commit()
    return inserts, commits


def _survey_s(small: SmallFace) -> float:
    """What `gc --dry-run` and the space keeper do: mark all, then look at every row of the chunk table."""
    parts = small.parts
    reclaim, open_recipes = parts.ingest.reclaim, small.face.open_recipes
    sweeper = Sweeper(parts.disk, parts.index, parts.segments, parts.histories, reclaim, open_recipes)
    began = time.process_time()
    trio.run(sweeper.survey)
    return time.process_time() - began


def _du_ms(small: SmallFace) -> float:
    parts = small.parts
    record = parts.histories.version(small.face.recorder.unit_of(small.at(UNIT)).unit, 1)
    assert record is not None
    count = UsageCount(parts.disk, small.face.namespace, parts.segments)
    began = time.process_time()
    trio.run(count.add_saved, Saved(b"", record.top))
    return (time.process_time() - began) * 1e3


# -- the daemon ---------------------------------------------------------------------------------


class MemoryWatch(threading.Thread):
    """Notes the most memory that a daemon and its workers had while the block ran."""

    def __init__(self, mount: Mount) -> None:
        super().__init__(daemon=True)
        self._mount = mount
        self._over = threading.Event()
        self.highest_mib = 0.0

    def __enter__(self) -> MemoryWatch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Look until the block ends."""
        while not self._over.wait(_LOOK_EVERY_S):
            self.highest_mib = max(self.highest_mib, self._mount.rss_anon_bytes() / _MIB)


def _daemons(asked: Asked) -> Iterator[Figure]:
    where = f"{asked.chunks:,} chunks"
    with ExitStack() as stack:
        both = [stack.enter_context(_mounted(asked.folder / name)) for name in ("large", "empty")]
        large = _mount_of(both[0])
        started = large.rss_anon_bytes() / _MIB
        with MemoryWatch(large) as surveying:
            _wait_until_quiet(both[0])
        starts = [Figure("mount until ready", name) for name in (where, "empty store")]
        for _ in range(asked.rounds):
            for figure, place in zip(starts, both, strict=True):
                figure.seconds.append(_restart_s(_mount_of(place)))
        _wait_until_quiet(both[0])
        ingests = [Figure(f"publish of {_INGEST_MIB} MiB", name) for name in (where, "empty store")]
        with MemoryWatch(large) as ingesting:
            for number in range(1 + min(asked.rounds, _INGESTS)):
                for figure, place in zip(ingests, both, strict=True):
                    figure.seconds.append(_ingest_s(_mount_of(place), number))
        for figure in ingests:
            del figure.seconds[0]  # it started what is started when it is needed
    starts[0].goal, starts[0].in_seconds = START_S, True
    ingests[0].goal = RATE
    for pair in (starts, ingests):
        pair[0].native_s = [*pair[1].seconds]
        yield from pair
    for name, found in (
        ("RssAnon, started", started),
        ("RssAnon, most while history is looked through", surveying.highest_mib),
        ("RssAnon, most while files are stored", ingesting.highest_mib),
    ):
        yield Figure(name, where, [found], unit="MiB", goal=RSS_MIB, in_seconds=True)


def _mounted(folder: Path) -> AbstractContextManager[Place]:
    """A mount that reads nothing of old versions by itself: their payloads are not there."""
    return ckptfs(folder, "auto", home=folder, digests=False, scrub_rate_mib_s=0, min_free="64MiB")


def _mount_of(place: Place) -> Mount:
    assert place.mount is not None
    return place.mount


def _restart_s(mount: Mount) -> float:
    mount.stop()
    began = time.perf_counter()
    mount.start()
    return time.perf_counter() - began


def _wait_until_quiet(place: Place) -> None:
    """Until what a daemon does by itself behind its start is over."""
    until = time.monotonic() + _QUIET_LIMIT_S
    time.sleep(3 * _QUIET_S)
    while time.monotonic() < until:
        used_s = place.cpu_s()
        time.sleep(_QUIET_S)
        if place.cpu_s() - used_s < _QUIET_S / 10:
            return
    raise TimeoutError(f"the daemon still works after {_QUIET_LIMIT_S:.0f} s")


def _ingest_s(mount: Mount, seed: int) -> float:
    """From the request to publish a closed file of new tensors to its version."""
    folder = mount.path / f"run{seed}"
    folder.mkdir()
    pieces = [random.Random(f"{seed} {number}").randbytes(_MIB) for number in range(_INGEST_MIB)]
    (folder / "model.safetensors").write_bytes(safetensors({"w": b"".join(pieces)}))
    began = time.perf_counter()
    publish_now(mount, folder.name)
    return time.perf_counter() - began
