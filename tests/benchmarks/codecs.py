"""What the codecs save on real training, and how fast they are on one core.

    python tests/benchmarks/codecs.py FOLDER [--rounds 9] [--mib 32] [--level fast]

FOLDER holds the series of tests/benchmarks/training.py (made first if it is empty). One rule: every chunk
that is counted was decoded again, and compared with its id. Ratios are exact: logical bytes over stored
payloads, each chunk cut, deduplicated and encoded as a store would, all of it history. Rates are medians of
CPU time, with BLAKE3 over the same chunks in the same rounds beside them: how fast the machine was.
A figure that misses its goal is printed as missed. Without `--level` both are shown; the goals are those of
the fast one.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import get_args

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from codecs_series import SERIES, saves_of

from ckptfs.store.chain_shape import Standing, choose_parent
from ckptfs.store.codecs import Coder, Encoded, Parent, Stored, decode_chunk, encode
from ckptfs.store.codecs.decoding import Chain, decode, unpack_chain
from ckptfs.store.codecs.encoded_chunk import decode_header
from ckptfs.store.codecs.kernels import NATIVE
from ckptfs.store.encoding_level import Level
from ckptfs.store.encoding_plan import PlannedChunk, Save, earlier_saves, match_save, plan_file
from ckptfs.store.formats import parse
from ckptfs.store.formats.layout import Layout
from ckptfs.store.hashing import Buffer, chunk_id
from ckptfs.store.ids import ChunkId
from ckptfs.store.recipe import Piece, Recipe
from ckptfs.store.regions import CHUNK_BYTES, Mode, cut_content, plan_regions
from ckptfs.store.segment_format import DIFFERENCES, Codec

GOALS = {"encode": (0.9, 0.6), "decode": (1.8, 1.2)}
"""GB/s without a parent and with one."""


class MappedFile:
    """A file as the format parsers read it; `view` is all of it."""

    def __init__(self, path: Path, closing: ExitStack) -> None:
        file = closing.enter_context(path.open("rb"))
        self.size = path.stat().st_size
        mapping = closing.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self.view = memoryview(mapping)
        closing.callback(self.view.release)

    def pread(self, offset: int, length: int) -> bytes:
        return bytes(self.view[offset : offset + length])


@dataclass(slots=True)
class Kept:
    """A stored chunk."""

    encoded: Encoded
    payload: bytes


@dataclass(slots=True)
class Tally:
    """What one series came to at a level. `work` are chunks to time, by dtype and whether they have a
    parent."""

    level: Level
    logical: int = 0
    unique: int = 0
    stored: int = 0
    by_codec: Counter[str] = field(default_factory=Counter)
    children: Counter[ChunkId] = field(default_factory=Counter)
    kept: dict[ChunkId, Kept] = field(default_factory=dict)
    work: dict[tuple[str, bool], list[tuple[bytes, str, Parent | None]]] = field(default_factory=dict)

    def standing(self, chunk: ChunkId) -> Standing | None:
        """Where a chunk stands, for the shape of the chains."""
        if chunk not in self.kept:
            return None
        encoded = self.kept[chunk].encoded
        base = encoded.parents[0] if encoded.codec in DIFFERENCES else None
        return Standing(encoded.depth, self.children[chunk], base)


def cut(view: memoryview, layout: Layout | None) -> tuple[Recipe, dict[ChunkId, memoryview]]:
    """The file's recipe and its chunks."""
    pieces: list[Piece] = []
    payloads: dict[ChunkId, memoryview] = {}
    for region in plan_regions(len(view), layout):
        whole = view[region.offset : region.offset + region.length]
        step = CHUNK_BYTES if region.mode is Mode.FIXED else 0
        lengths = [step] * -(-region.length // step) if step else cut_content(whole)
        at = 0
        for length in lengths:
            payload = whole[at : at + length]
            chunk = chunk_id(payload)
            pieces.append(Piece(len(payload), chunk))
            payloads[chunk] = payload
            at += length
    return Recipe(pieces), payloads


def encode_series(
    folder: Path, globs: Iterable[str], coder: Coder, closing: ExitStack, mib: int, level: Level
) -> Tally:
    """Store a series save by save, the oldest first."""
    tally = Tally(level)
    saves: list[Save] = []
    recipes: dict[tuple[int, str], Recipe] = {}
    for number, paths in enumerate(saves_of(folder, globs), 1):
        files: dict[str, Layout] = {}
        layouts: dict[str, Layout | None] = {}
        payloads: dict[ChunkId, memoryview] = {}
        for path in paths:
            mapped = MappedFile(path, closing)
            name = str(path.relative_to(folder))
            layout = layouts[name] = parse(mapped, name)
            recipes[number, name], found = cut(mapped.view, layout)
            payloads |= found
            tally.logical += mapped.size
            if layout is not None:
                files[name] = layout
        save = Save(number, number, files)
        earlier = earlier_saves(save, saves)
        candidates = match_save(save, earlier)
        places = {(0, name): recipes[number, name] for name in layouts}
        for distance, other in enumerate(earlier, 1):
            places |= {(distance, name): recipes[other.number, name] for name in other.files}
        # float32 first, so that what is a cast of it finds it encoded.
        for choice in (None, 0, 1):
            for name, layout in layouts.items():
                own = {tensor: one for (path, tensor), one in candidates.items() if path == name}
                for planned in plan_file(places[0, name], layout, own, places, choice or 0):
                    if choice is None and planned.dtype == "BF16":
                        continue
                    store(tally, planned, payloads, coder, is_last=choice != 0, mib=mib)
        saves.append(save)
    return tally


def store(
    tally: Tally,
    planned: PlannedChunk,
    payloads: dict[ChunkId, memoryview],
    coder: Coder,
    *,
    is_last: bool,
    mib: int,
) -> None:
    """Encode a chunk that is not stored yet; what may still be found to be a cast waits for the last turn."""
    if planned.chunk in tally.kept:
        return
    payload = bytes(payloads[planned.chunk])
    parent = parent_of(tally, planned.parent and choose_parent(planned.parent, tally.standing))
    casts = [one for one in (parent_of(tally, chunk) for chunk in planned.cast_of) if one is not None]
    encoded = encode(payload, planned.dtype, parent, casts, coder, tally.level)
    if not is_last and encoded.codec is not Codec.CAST:
        return
    tally.kept[planned.chunk] = Kept(encoded, payload)
    tally.children.update(encoded.parents)
    tally.unique += len(payload)
    tally.stored += len(encoded.stored)
    tally.by_codec[encoded.codec.name] += len(payload)
    assert decode_chunk(planned.chunk, lambda chunk: _fetched(tally, chunk), coder) == payload
    if planned.dtype in ("F32", "BF16") and len(payload) == CHUNK_BYTES:
        for one in (None, parent) if encoded.codec in DIFFERENCES else (None,):
            work = tally.work.setdefault((planned.dtype, one is not None), [])
            if len(work) * CHUNK_BYTES < mib << 20:
                work.append((payload, planned.dtype, one))


def parent_of(tally: Tally, chunk: ChunkId | None) -> Parent | None:
    kept = tally.kept.get(chunk) if chunk is not None else None
    return Parent(chunk, kept.payload, kept.encoded.depth) if kept is not None and chunk is not None else None


def _fetched(tally: Tally, chunk: ChunkId) -> Stored:
    kept = tally.kept[chunk]
    return Stored(kept.encoded.codec, len(kept.payload), kept.encoded.stored)


def cpu_s(action: Callable[[], object]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def decoded(stored: Buffer, parents: Sequence[bytes], coder: Coder) -> Buffer:
    """As a reader decodes a chunk whose parents are at hand."""
    header = decode_header(stored)
    if header.codec in (Codec.PLANES, Codec.DELTA):
        return unpack_chain(Chain([(stored, header)], parents[0] if parents else None), coder)
    return decode(stored, header, parents, coder)


def rates(
    work: list[tuple[bytes, str, Parent | None]], rounds: int, coder: Coder, level: Level
) -> dict[str, float]:
    """GB/s of encode and decode with the parents at hand, and of BLAKE3, on one core."""
    encoded = [encode(payload, dtype, parent, (), coder, level) for payload, dtype, parent in work]
    kept = [
        (one.stored, [parent.payload] if parent is not None and one.parents else [])
        for one, (_, _, parent) in zip(encoded, work, strict=True)
        if one.codec is not Codec.RAW
    ]
    whole = sum(len(payload) for payload, _, _ in work)
    coded = sum(decode_header(stored).length for stored, _ in kept)
    # Results are dropped at once, as one that is written or sent is: else the kernel's zeroing of fresh
    # memory is what is measured.
    actions: dict[str, Callable[[], object]] = {
        "encode": lambda: deque((encode(*one, (), coder, level) for one in work), 0),
        "decode": lambda: deque((decoded(stored, parents, coder) for stored, parents in kept), 0),
        "BLAKE3": lambda: deque((chunk_id(payload) for payload, _, _ in work), 0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            seconds[name].append(cpu_s(action))
    sizes = {"encode": whole, "decode": coded, "BLAKE3": whole}
    return {name: sizes[name] / median(taken) / 1e9 for name, taken in seconds.items()}


def verdict(value: float, goal: float | None) -> str:
    return "" if goal is None else f"≥ {goal:g} " + ("met" if value >= goal else "MISSED")


def show_ratios(tallies: dict[str, Tally]) -> None:
    (level,) = {tally.level for tally in tallies.values()}
    table = Table(f"series, {level}", "MB", "dedup", "logical/stored", "goal", "unique bytes by codec")
    for (name, said, _), tally in zip(SERIES, tallies.values(), strict=True):
        goal = said if level == "fast" else None
        ratio = tally.logical / tally.stored
        codecs = ", ".join(
            f"{codec.lower()} {share / tally.unique:.0%}" for codec, share in tally.by_codec.most_common()
        )
        dedup = f"{tally.logical / tally.unique:.2f}"
        table.add_row(name, f"{tally.logical / 1e6:.0f}", dedup, f"{ratio:.3f}", verdict(ratio, goal), codecs)
    Console(width=130).print(table)


def show_rates(tallies: dict[str, Tally], rounds: int, coder: Coder) -> None:
    loops = "native" if NATIVE is not None else "numpy"
    (level,) = {tally.level for tally in tallies.values()}
    table = Table(f"GB/s, one core, {loops}, {level}", "chunks", "encode", "goal", "decode", "goal", "BLAKE3")
    work: dict[str, list[tuple[bytes, str, Parent | None]]] = {}
    for name, tally in tallies.items():
        for (dtype, has_parent), chunks in tally.work.items():
            kind = "with parent" if has_parent else "alone"
            work[f"{name}, {dtype} {kind}"] = chunks
    for label, chunks in sorted(work.items(), key=lambda one: one[0].split(", ")[-1]):
        found = rates(chunks, rounds, coder, level)
        which = label.endswith("with parent")
        goals = [GOALS[name][which] if level == "fast" else None for name in ("encode", "decode")]
        table.add_row(
            label,
            str(len(chunks)),
            f"{found['encode']:.2f}",
            verdict(found["encode"], goals[0]),
            f"{found['decode']:.2f}",
            verdict(found["decode"], goals[1]),
            f"{found['BLAKE3']:.2f}",
        )
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=32, help="of each kind of chunk, for the rates")
    parser.add_argument("--level", choices=get_args(Level), help="this one only")
    asked = parser.parse_args()
    if not asked.folder.is_dir() or not any(asked.folder.iterdir()):
        from training import make_series

        make_series(asked.folder, 300, 10, 256, 6, 16)
    coder = Coder()
    for level in get_args(Level) if asked.level is None else (asked.level,):
        with ExitStack() as closing:
            tallies = {
                name: encode_series(asked.folder, globs, coder, closing, asked.mib, level)
                for name, _, globs in SERIES
            }
            show_ratios(tallies)
            show_rates(tallies, asked.rounds, coder)


if __name__ == "__main__":
    main()
