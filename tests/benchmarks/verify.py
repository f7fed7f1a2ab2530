"""How fast `ckptfs verify` is beside BLAKE3 alone: the same bytes, in the page cache, the same threads.

    python tests/benchmarks/verify.py [--mib 1024] [--rounds 7] [--plain]

The one rule: both are measured in turn, in one process, so that what else runs on the machine meets both.
Prints one JSON line; `ratio` is verify over BLAKE3 alone (bytes a second), the median over the rounds.
`--plain` stores content that is cut by content (64 KiB mean) instead of tensors (256 KiB).
"""

from __future__ import annotations

import argparse
import json
import mmap
import random
import shutil
import sys
import threading
import time
from pathlib import Path
from statistics import median

import trio

sys.path.insert(0, str(Path(__file__).parents[1]))

from saved_store import SavedStore
from small_store import memory_or, safetensors

from ckptfs.daemon.hashing_processes import HashingProcesses
from ckptfs.daemon.verifying import Verifier, worker_limiter
from ckptfs.store.hashing import chunk_id
from ckptfs.store.history import VersionRecord
from ckptfs.store.segment_files import read_idx
from ckptfs.store.segment_format import segment_paths


def verify_s(
    store: SavedStore, record: VersionRecord, limiter: trio.CapacityLimiter, processes: HashingProcesses
) -> tuple[float, int]:
    """Seconds and bytes of one verification of a version."""
    verifier = Verifier(store.disk, store.segments, limiter, lambda progress: None, processes)
    started = time.perf_counter()
    verdict = trio.run(verifier.check, record.top, ())
    assert not verdict.corrupt
    return time.perf_counter() - started, verdict.checked_bytes


def alone_s(store: SavedStore, segment: int, threads: int) -> tuple[float, int]:
    """Seconds and bytes of hashing the chunks of a segment from a mapping, in `threads` threads."""
    path = store.root / segment_paths(segment)[0]
    rows = [row for row in read_idx(store.disk, segment).rows if not row.flags]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = memoryview(mapped)
        share = -(-len(rows) // threads)

        def work(first: int) -> None:
            for row in rows[first : first + share]:
                chunk_id(view[row.offset : row.offset + row.length])

        workers = [threading.Thread(target=work, args=(at,)) for at in range(0, len(rows), share)]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        took = time.perf_counter() - started
        view.release()
    return took, sum(row.length for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="verify beside BLAKE3 alone")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plain", action="store_true")
    asked = parser.parse_args()
    root = memory_or(Path("."))
    limiter = worker_limiter()
    threads = int(limiter.total_tokens)
    try:
        payload = b"".join(random.Random(n).randbytes(1 << 20) for n in range(asked.mib))
        content = payload if asked.plain else safetensors({"w": payload})
        store = SavedStore(root)
        record = trio.run(store.publish, b"run", {b"model.bin": content})
        del payload, content
        processes = HashingProcesses(store.disk)
        trio.run(processes.prepare)
        numbers = [int(path.stem, 16) for path in root.glob("segments/*/*.seg")]
        largest = max(numbers, key=lambda n: (root / segment_paths(n)[0]).stat().st_size)
        verify_rates, alone_rates = [], []
        for _ in range(asked.rounds):
            took, length = verify_s(store, record, limiter, processes)
            verify_rates.append(length / took)
            took, length = alone_s(store, largest, threads)
            alone_rates.append(length / took)
        processes.close()
        store.close()
        ratios = [a / b for a, b in zip(verify_rates, alone_rates, strict=True)]
        figures = {
            "threads": threads,
            "verify_gb_s": round(median(verify_rates) / 1e9, 2),
            "blake3_gb_s": round(median(alone_rates) / 1e9, 2),
            "ratio": round(median(ratios), 3),
            "ratios": [round(one, 2) for one in ratios],
        }
        print(json.dumps(figures))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
