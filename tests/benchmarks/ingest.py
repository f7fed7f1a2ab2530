"""How fast files become chunks: from a request to publish to the version, of data in the page cache.

    ./dev bench --only ingest [--mib 1024] [--rounds 9]

Two daemons on stores in memory, one held to a single core, take in turn a file of tensors and one that is
cut by content; beside them the same bytes are hashed by BLAKE3 alone, in chunks of 256 KiB, on that one
core: from a mapping of the same file in the page cache, and from memory that has no page to be mapped. Then
a writer on a file that stays open is measured while a large file of another unit is stored, and without.

One rule: every round begins with an empty store, so nothing is ever known already.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from mounting import Mount
from places import Asked, ckptfs
from report import Figure
from small_store import safetensors

from ckptfs.daemon.control_client import ControlClient
from ckptfs.daemon.messages import Publish
from ckptfs.daemon.places import socket_path
from ckptfs.store.hashing import chunk_id

CHUNK_BYTES = 256 << 10
MOST_MIB = 1024
TENSORS, CONTENT_GB_S, CORES, WRITER = 0.7, 0.9, 1.5, 0.95
_KINDS = {"tensors": "model.safetensors", "content-defined": "corpus.bin"}
_PIECE_BYTES = 4 << 20
_FIRST_BYTES = 80 << 20
_WRITTEN_BYTES = 64 << 20
_LISTED_WITHIN_S = 120.0
_ALONE_S = 1.0
_LOOK_EVERY_S = 0.01


def figures(asked: Asked) -> Iterator[Figure]:
    """All of them."""
    source = asked.folder / "source"
    source.mkdir(parents=True)
    mib = min(asked.mib, MOST_MIB)
    payload = b"".join(random.Random(n).randbytes(1 << 20) for n in range(mib))
    (source / _KINDS["tensors"]).write_bytes(safetensors({"w": payload}))
    (source / _KINDS["content-defined"]).write_bytes(payload[1:])
    cores = sorted(os.sched_getaffinity(0))
    yield from _rates(asked, source, payload, cores)
    del payload
    yield _writer(asked, source / _KINDS["tensors"])


def _rates(asked: Asked, source: Path, payload: bytes, cores: list[int]) -> Iterator[Figure]:
    places = {"one core": cores[:1], f"{len(cores)} cores": cores}
    found = {
        (kind, place): Figure(f"ingest, {kind}", place, data_bytes=len(payload), unit="GB/s", at_least=True)
        for kind in _KINDS
        for place in places
    }
    alone = Figure("BLAKE3 alone, from a mapping", "one core", data_bytes=len(payload))
    in_memory = Figure("BLAKE3 alone, from memory", "one core", data_bytes=len(payload))
    seconds = {key: Figure(f"{one.name}, beside BLAKE3", one.place) for key, one in found.items()}
    for _ in range(asked.rounds):
        with _held_to(cores[:1]):
            _hash_alone(in_memory, payload)
            with _mapped(source / _KINDS["tensors"]) as view:
                _hash_alone(alone, view)
        for place, some in places.items():
            for kind, name in _KINDS.items():
                taken, cpu_s = _stored_s(asked.folder, source / name, some)
                found[kind, place].seconds.append(len(payload) / 1e9 / taken)
                found[kind, place].daemon_cpu_s.append(cpu_s)
                seconds[kind, place].seconds.append(taken)
    yield from (alone, in_memory)
    found["content-defined", "one core"].goal = CONTENT_GB_S
    found["content-defined", "one core"].in_seconds = True
    yield from found.values()
    beside = seconds["tensors", "one core"]
    yield Figure(
        "ingest, tensors, beside BLAKE3 from memory", "one core", [*beside.seconds], [*in_memory.seconds]
    )
    beside.native_s, beside.goal = [*alone.seconds], TENSORS
    yield beside
    if len(cores) > 1:
        for kind in _KINDS:
            one, several = (seconds[kind, place] for place in places)
            several.name = f"ingest, {kind}, times faster than on one core"
            several.native_s, several.goal = [*one.seconds], CORES
            yield several


def _hash_alone(figure: Figure, content: bytes | memoryview) -> None:
    cpu_s, began = time.process_time(), time.perf_counter()
    view = memoryview(content)
    for at in range(0, len(view), CHUNK_BYTES):
        chunk_id(view[at : at + CHUNK_BYTES])
    figure.seconds.append(time.perf_counter() - began)
    figure.client_cpu_s.append(time.process_time() - cpu_s)


@contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        view = memoryview(mapping)
        yield view
        view.release()


def _stored_s(folder: Path, source: Path, cores: list[int]) -> tuple[float, float]:
    """Seconds, and CPU seconds, from the request to publish a closed file to the answer."""
    try:
        with _held_to(cores), ckptfs(folder, "auto", digests=False) as place:
            assert place.mount is not None
            for unit in ("first", "run"):  # the first starts what is started when it is needed
                (place.path / unit).mkdir()
            (place.path / "first" / "file").write_bytes(random.randbytes(_FIRST_BYTES))
            publish_now(place.mount, "first")
            shutil.copyfile(source, place.path / "run" / source.name)
            cpu_s, began = place.cpu_s(), time.perf_counter()
            publish_now(place.mount, "run")
            return time.perf_counter() - began, place.cpu_s() - cpu_s
    finally:
        shutil.rmtree(folder / "ckptfs-auto", ignore_errors=True)


def publish_now(mount: Mount, unit: str) -> None:
    """As `ckptfs publish` does, without the start of a process."""
    with ControlClient(socket_path(str(mount.path), os.geteuid()), os.geteuid()) as client:
        client.ask(Publish(path=f"/{unit}"))


@contextmanager
def _held_to(cores: list[int]) -> Iterator[None]:
    """This process, and what it starts, run on these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# -- a writer beside it -------------------------------------------------------------------------


class Writer(threading.Thread):
    """Writes the same 64 MiB over and over, and notes when each time began and how long it took."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path = path
        self.over = threading.Event()
        self.passes: list[tuple[float, float]] = []

    def run(self) -> None:
        """Until `over` is set."""
        piece = memoryview(random.randbytes(_PIECE_BYTES))
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            while not self.over.is_set():
                began = time.monotonic()
                for at in range(0, _WRITTEN_BYTES, _PIECE_BYTES):
                    os.pwrite(fd, piece, at)
                self.passes.append((began, time.monotonic() - began))
        finally:
            os.close(fd)


def _writer(asked: Asked, source: Path) -> Figure:
    """Medians of the passes of a round: beside ingest, and after it in the same round."""
    figure = Figure("a writer beside ingest", "ckptfs auto", data_bytes=_WRITTEN_BYTES, goal=WRITER)
    for _ in range(asked.rounds):
        try:
            with ckptfs(asked.folder, "auto", settle_s=0.2, settle_max_s=1.0, digests=False) as place:
                assert place.mount is not None
                for unit in ("written", "stored"):
                    (place.path / unit).mkdir()
                beside, alone = _write_beside(place.mount, source)
        finally:
            shutil.rmtree(asked.folder / "ckptfs-auto", ignore_errors=True)
        figure.seconds.append(median(beside))
        figure.native_s.append(median(alone))
    return figure


def _write_beside(mount: Mount, source: Path) -> tuple[list[float], list[float]]:
    writer = Writer(mount.path / "written" / "log.bin")
    shutil.copyfile(source, mount.path / "stored" / "model.safetensors")
    closed = time.monotonic()
    writer.start()
    try:
        while not mount.version_names("stored"):
            if time.monotonic() > closed + _LISTED_WITHIN_S:
                raise TimeoutError("no version is listed")
            time.sleep(_LOOK_EVERY_S)
        listed = time.monotonic()
        time.sleep(_ALONE_S)
    finally:
        writer.over.set()
        writer.join()
    settled = closed + mount.settle_s
    beside = [took for began, took in writer.passes if began >= settled and began + took <= listed]
    # The first pass makes the file, and what was begun before the version was listed is neither.
    alone = [took for began, took in writer.passes[1:] if began > listed]
    return beside or alone, alone
