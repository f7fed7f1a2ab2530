"""Push and pull against a plain upload and download of the same bytes, over a real S3 server on the loopback.

    python tests/benchmarks/remotes.py [--mib 128] [--rounds 3] [--lag-s 0]

The one rule: both ways take the same number of requests at a time and the same bytes, in turns, in one
process; what is compared is the median of the ratios. Stores, server and files lie in memory (/dev/shm), so
that the disk of the machine is not measured; the server shares its cores. A download is measured twice: into
memory, and into files, as a pull has to. A remote is made, and the storage probed, before a push is timed:
that is done once in its life. The server keeps everything: memory for twice --mib times --rounds is needed.

With --lag-s N: a job saves --mib every N seconds, six times, and each save is copied at once; how long after
its version it is safe is printed.

Prints one line of JSON: rates in MiB/s, ratios, peak memory in MiB, requests per GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import trio
from saved_store import SavedStore, Tree
from seaweed import S3Server, s3_server
from small_store import safetensors

from ckptfs.store.bucket import Bucket
from ckptfs.store.bucket_cloud import open_cloud
from ckptfs.store.remote.catalogue import read_unit
from ckptfs.store.remote.copied import CopiedUnits
from ckptfs.store.remote.heads import newest_heads
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.pull import Puller
from ckptfs.store.remote.push import Pusher
from ckptfs.store.remote.several import done_for_each
from ckptfs.store.signing import SigningKey

PART_BYTES = 16 << 20
PARALLEL = 4
FILES = 4
SAVES = 6
MIB = 1 << 20


class CountingBucket:
    """Another bucket, whose calls are counted by method."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> object:
        found = getattr(self._bucket, name)
        if callable(found):
            self.calls[name] += 1
        return found


def saved(mib: int, seed: int) -> Tree:
    """A checkpoint that no other has anything of."""
    rng = np.random.default_rng(seed)
    size = mib * MIB // FILES
    return {b"%d.safetensors" % number: safetensors({"weight": rng.bytes(size)}) for number in range(FILES)}


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


class Bench:
    """One server, one sender, and a fresh store for each pull."""

    def __init__(self, server: S3Server, folder: Path, mib: int) -> None:
        self._server = server
        self._folder = folder
        self._mib = mib
        self._numbers = iter(range(1_000_000))
        self.sender = SavedStore(folder / "sender", key=SigningKey(b"k" * 32))

    def bucket(self, prefix: str) -> Bucket:
        return open_cloud(f"s3://tests/{prefix}", self._server.options)

    def pusher(self, bucket: Bucket, name: str) -> Pusher:
        one = self.sender
        copied = CopiedUnits(one.index, name)
        return Pusher(Remote(bucket), one.disk, one.segments, one.histories, copied, "bench")

    async def _download_into(self, folder: Path, plain: Bucket, parts: Sequence[int]) -> None:
        """What somebody without ckptfs would do: files, synced."""
        folder.mkdir()

        def keep(name: str, content: bytes) -> None:
            with (folder / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())

        async def one(part: int) -> None:
            await trio.to_thread.run_sync(keep, str(part), await plain.read(str(part)))

        await done_for_each(one, parts, PARALLEL)

    async def round(self) -> dict[str, float]:
        number = next(self._numbers)
        unit = self.sender.unit(b"run").unit
        await self.sender.publish(b"run", saved(self._mib, number))
        for old in self.sender.histories.numbers(unit)[:-1]:
            self.sender.histories.forget(unit, old)
        parts = [os.urandom(PART_BYTES) for _ in range(self._mib * MIB // PART_BYTES)]
        plain = self.bucket(f"plain-{number}")

        async def upload(one: int) -> None:
            await plain.create(str(one), parts[one])

        async def download(one: int) -> int:
            return len(await plain.read(str(one)))

        indexes = range(len(parts))
        found = {"upload_s": await timed(lambda: done_for_each(upload, indexes, PARALLEL))}
        made = Remote(self.bucket(f"remote-{number}"))
        found["make_remote_s"] = await timed(lambda: made.open(create=True))
        pushing = CountingBucket(self.bucket(f"remote-{number}"))
        pusher = self.pusher(pushing, f"r{number}")  # type: ignore[arg-type]
        found["push_s"] = await timed(lambda: pusher.push(unit))
        found["push_requests"] = pushing.calls.total()
        parts.clear()
        found["download_s"] = await timed(lambda: done_for_each(download, indexes, PARALLEL))
        files = self._folder / f"files-{number}"
        found["download_into_files_s"] = await timed(lambda: self._download_into(files, plain, indexes))
        shutil.rmtree(files)
        pulling = CountingBucket(self.bucket(f"remote-{number}"))
        receiver = SavedStore(self._folder / f"receiver-{number}")
        try:
            found["pull_s"] = await timed(lambda: self._pull(Remote(pulling), receiver))  # type: ignore[arg-type]
        finally:
            receiver.close()
        found["pull_requests"] = pulling.calls.total()
        return found

    async def _pull(self, remote: Remote, store: SavedStore) -> None:
        await remote.open()
        (newest,) = await newest_heads(remote)
        assert newest.head is not None
        unit = await read_unit(remote, newest.head)
        puller = Puller(remote, store.index, store.segments, store.ingest, store.histories, os.urandom)
        await puller.pull(unit.versions[-1], b"copy")

    async def lags(self, every_s: float) -> list[float]:
        """Seconds from each version to its safety, of a job that saves `every_s` apart."""
        found: list[float] = []
        pusher, unit = self.pusher(self.bucket("lag"), "lag"), self.sender.unit(b"run").unit
        for number in range(SAVES):
            begun = trio.current_time()
            await self.sender.publish(b"run", saved(self._mib, 1000 + number))
            found.append(await timed(lambda: pusher.push(unit)))
            await trio.sleep(max(0.0, begun + every_s - trio.current_time()))
        return found


async def run(server: S3Server, folder: Path, mib: int, rounds: int, lag_s: float) -> dict[str, object]:
    bench = Bench(server, folder, mib)
    try:
        found = [await bench.round() for _ in range(rounds)]
        lags = await bench.lags(lag_s) if lag_s else []
    finally:
        bench.sender.close()

    def median(value: Callable[[dict[str, float]], float]) -> float:
        return round(statistics.median(map(value, found)), 3)

    return {
        "mib": mib,
        "rounds": rounds,
        "upload_mib_s": median(lambda one: mib / one["upload_s"]),
        "make_remote_s": median(lambda one: one["make_remote_s"]),
        "push_mib_s": median(lambda one: mib / one["push_s"]),
        "push_ratio": median(lambda one: one["upload_s"] / one["push_s"]),
        "download_mib_s": median(lambda one: mib / one["download_s"]),
        "pull_mib_s": median(lambda one: mib / one["pull_s"]),
        "pull_ratio": median(lambda one: one["download_s"] / one["pull_s"]),
        "download_into_files_mib_s": median(lambda one: mib / one["download_into_files_s"]),
        "pull_ratio_to_files": median(lambda one: one["download_into_files_s"] / one["pull_s"]),
        "push_requests_per_gib": median(lambda one: one["push_requests"] * 1024 / mib),
        "pull_requests_per_gib": median(lambda one: one["pull_requests"] * 1024 / mib),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "lag_s": [round(one, 2) for one in lags],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="push and pull against plain transfers")
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lag-s", type=float, default=0.0)
    asked = parser.parse_args()
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="ckptfs-remotes-", dir=shared) as name:
        folder = Path(name)
        gib = 1 + -(-2 * asked.mib * (asked.rounds + SAVES) // 1024)
        with s3_server(folder / "server", gib) as server:
            print(json.dumps(trio.run(run, server, folder, asked.mib, asked.rounds, asked.lag_s)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
