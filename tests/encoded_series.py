"""Saves of one run whose tensors change a little from one to the next, stored and then encoded.

The one rule: what a file should hold comes from here, never from the store.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import trio
from small_store import SmallStore, memory_or

from ckptfs.store.chain_shape import ChainShape
from ckptfs.store.encoding_level import Level
from ckptfs.store.encoding_plan import PlannedChunk, Save, earlier_saves, match_save, plan_file
from ckptfs.store.formats import parse
from ckptfs.store.histories import Histories
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change, Table
from ckptfs.store.ingest import Ingested
from ckptfs.store.layout import Format, encode_format
from ckptfs.store.rebuild import rebuild
from ckptfs.store.recipe import Recipe
from ckptfs.store.reencode import Encoding, Reencoder
from ckptfs.store.scrub import Scrubber
from ckptfs.store.scrub_run import Met
from ckptfs.store.scrub_state import ScrubRun
from ckptfs.store.segment_counts import Stored
from ckptfs.store.segment_files import read_idx
from ckptfs.store.segment_format import (
    MAX_DEPTH,
    Codec,
    Location,
    SegmentKind,
    decode_facts,
    decode_location,
    segment_paths,
)
from ckptfs.store.segments import Segments

PATH = "model.safetensors"
BFLOAT16 = "export.safetensors"


def saves(
    count: int, *, values: int = 160_000, counters: int = 20_000, seed: int = 1
) -> list[dict[str, bytes]]:
    """The files of so many saves: float32 weights, a counter, and the weights' cast to bfloat16."""
    draw = np.random.default_rng(seed)
    weights = draw.standard_normal(values, np.float32)
    found = []
    for step in range(count):
        weights = weights + draw.standard_normal(values, np.float32) * np.float32(1e-4)
        counter = np.arange(counters, dtype=np.int64) + step
        exported = (weights.view(np.uint32) + 0x7FFF + (weights.view(np.uint32) >> 16 & 1) >> 16).astype(
            "<u2"
        )
        found.append(
            {
                PATH: tensor_file({"w": ("F32", weights.tobytes()), "step": ("I64", counter.tobytes())}),
                BFLOAT16: tensor_file({"w": ("BF16", exported.tobytes())}),
            }
        )
    return found


def tensor_file(tensors: dict[str, tuple[str, bytes]]) -> bytes:
    """A safetensors file of vectors."""
    widths = {"F32": 4, "I64": 8, "BF16": 2}
    header, at = {}, 0
    for name, (dtype, payload) in tensors.items():
        shape = [len(payload) // widths[dtype]]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(payload)]}
        at += len(payload)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + b"".join(one for _, one in tensors.values())


class Series:
    """Saves in a store. `recipes` are those of each save's files, by path; `level` is that of `encode`."""

    def __init__(self, store: SmallStore, files: Sequence[dict[str, bytes]], level: Level = "fast") -> None:
        self.store = store
        self.level: Level = level
        self.files = files
        self.stored: list[dict[str, Ingested]] = [
            {path: store.store_bytes(payload, path) for path, payload in save.items()} for save in files
        ]

    def encode(self, number: int) -> Encoding:
        """Encode a save against those before it, with room on the disk given back."""
        done = trio.run(reencoder(self.store).encode, self.planned(number), self.level)
        self.store.reclaim()
        return done

    def encode_all(self) -> None:
        """Encode every save but the newest, the oldest first."""
        for number in range(len(self.stored) - 1):
            self.encode(number)

    def planned(self, number: int) -> list[PlannedChunk]:
        """What to encode a save's chunks against; what is the cast of others comes last."""
        known = [self._save(n) for n in range(number + 1)]
        earlier = earlier_saves(known[number], known[:number])
        candidates = match_save(known[number], earlier)
        recipe_of = {(0, path): self.recipe(number, path) for path in self.files[number]}
        for at, save in enumerate(earlier, 1):
            recipe_of |= {(at, path): self.recipe(save.number, path) for path in save.files}
        planned: list[PlannedChunk] = []
        for path, layout in known[number].files.items():
            by_name = {name: found for (where, name), found in candidates.items() if where == path}
            planned += plan_file(recipe_of[0, path], layout, by_name, recipe_of)
        return sorted(planned, key=lambda one: bool(one.cast_of))

    def recipe(self, number: int, path: str) -> Recipe:
        """The recipe of a file of a save."""
        return self.store.segments.read_recipe(self.stored[number][path].recipe)

    def chunks(self, number: int, path: str = PATH) -> list[ChunkId]:
        """The chunks of a file of a save."""
        return list(self.recipe(number, path).chunks())

    def check(self, request_bytes: int = 1 << 20) -> None:
        """Every byte of every save is what was saved."""
        for stored, files in zip(self.stored, self.files, strict=True):
            for path, payload in files.items():
                assert self.store.read(stored[path], request_bytes) == payload, path

    def _save(self, number: int) -> Save:
        readers = {
            path: self.store.segments.file_reader(self.recipe(number, path)) for path in self.files[number]
        }
        layouts = {path: parse(reader, path, None) for path, reader in readers.items()}
        return Save(number, number, {path: one for path, one in layouts.items() if one is not None})


def reencoder(store: SmallStore) -> Reencoder:
    """One that works in a thread, and makes chains as deep as the format has them."""
    shape = ChainShape(MAX_DEPTH, 8)
    return Reencoder(store.disk, store.index, store.segments, store.ingest.committer, shape=shape)


def located(segments: Segments, chunk: ChunkId) -> Location:
    """Where a chunk lies that is there."""
    location = segments.locate(chunk)
    assert location is not None
    return location


def encoded_chunks(series: Series, number: int, path: str = PATH) -> list[ChunkId]:
    """The chunks of a file that are encoded now."""
    segments = series.store.segments
    return [one for one in series.chunks(number, path) if located(segments, one).codec != Codec.RAW]


def check_tables(store: SmallStore) -> None:
    """What FORMAT.md says of the tables at every commit, the .idx files agree, and the sums are right."""
    segments = store.segments
    check_counts(store)
    edges = set[bytes]()
    for key, value in store.index.scan(Table.CHUNK):
        location = located(segments, ChunkId(key))
        rows = {row.chunk: row for row in read_idx(store.disk, location.segment).rows}
        row = rows[ChunkId(key)]
        assert row.location(location.segment) == location
        lineage = segments.parents.lineage(ChunkId(key))
        assert (row.depth, row.parents) == ((lineage.depth, lineage.parents) if lineage else (0, ()))
        for parent in row.parents:
            assert store.index.get(Table.CHUNK, parent) is not None
            assert segments.parents.depth(parent) < row.depth <= MAX_DEPTH
            edges.add(parent + key)
        assert value
    assert {key for key, _ in store.index.scan(Table.CHILD)} == edges


def check_counts(store: SmallStore) -> Stored:
    """What the segment table says of each segment, and its sums, are those of the chunk table; the sums."""
    counts: dict[int, list[int]] = {}
    for _, value in store.index.scan(Table.CHUNK):
        one = decode_location(value)
        known = counts.setdefault(one.segment, [0, 0, 0])
        for at, more in enumerate((1, one.stored, one.length - one.stored)):
            known[at] += more
    rows = {int.from_bytes(key, "big"): decode_facts(row) for key, row in store.index.scan(Table.SEGMENT)}
    told = {
        number: [facts.chunks, facts.payload_bytes, facts.spared_bytes]
        for number, facts in rows.items()
        if facts.chunks
    }
    assert told == counts
    encoded = [counts[number] for number in counts if rows[number].kind == SegmentKind.ENCODED]
    encoded_bytes, spared_bytes = (sum(one[at] for one in encoded) for at in (1, 2))
    raw_bytes = sum(payload for _, payload, _ in counts.values()) - encoded_bytes
    stored = Stored(raw_bytes, encoded_bytes, encoded_bytes + spared_bytes)
    assert store.segments.stored() == stored
    return stored


def family(series: Series) -> tuple[ChunkId, ChunkId]:
    """An encoded chunk of the first save, and that of the second that is encoded against it alone."""
    table = series.store.segments.parents
    for child in encoded_chunks(series, 1):
        lineage = table.lineage(child)
        if lineage is not None and len(lineage.parents) == 1:
            return lineage.parents[0], child
    raise AssertionError("nothing is encoded against anything")


def flip(store: SmallStore, chunk: ChunkId, at: int = 40) -> None:
    location = located(store.segments, chunk)
    path = store.root / segment_paths(location.segment)[0]
    with path.open("r+b") as file:
        file.seek(location.offset + at)
        byte = file.read(1)[0]
        file.seek(location.offset + at)
        file.write(bytes([byte ^ 1]))


def scrub(store: SmallStore) -> ScrubRun:
    """A scrub of the whole store, in which nothing refers to a chunk."""

    async def uses(wanted: set[ChunkId]) -> dict[ChunkId, Met]:
        return {}

    histories = Histories(store.disk, store.index)
    scrubber = Scrubber(store.disk, store.index, store.segments, store.ingest.reclaim, histories, uses)
    return trio.run(scrubber.run_now)


def rebuilt(series: Series) -> list[str]:
    """Make the index anew from what lies in segments; the problems that were told."""
    store = series.store
    store.close()
    try:
        found = rebuild(store.disk, boot_id="boot", now_ns=5)
    finally:
        store._open()
    return found.problems


def removed(store: SmallStore, chunks: list[ChunkId]) -> set[ChunkId]:
    """Those of `chunks` that a removal takes out."""
    change = Change()
    store.ingest.reclaim.stage_removal(change, chunks)
    store.index.apply(change)
    store.reclaim()
    return {chunk for chunk in chunks if store.segments.locate(chunk) is None}


@contextmanager
def encoded_series(
    tmp_path: Path, files: Sequence[dict[str, bytes]], level: Level = "fast"
) -> Iterator[Series]:
    """A store of its own with these saves, all but the newest encoded, opened again."""
    root = memory_or(tmp_path)
    (root / "format").write_bytes(encode_format(Format()))
    store = SmallStore(root)
    try:
        one = Series(store, files, level)
        one.encode_all()
        store.reopen()
        yield one
    finally:
        store.close()
        shutil.rmtree(root)
