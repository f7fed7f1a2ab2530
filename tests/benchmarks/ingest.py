"""How fast files become chunks: ingest and publish of data in the page cache, beside BLAKE3 alone.

    python tests/benchmarks/ingest.py [--mib 1024] [--rounds 5]

One rule: both are measured in turn in one process, on the same cores, so that what else runs on the machine
meets both. The store is on tmpfs; a round is from the close of the file to its version. Prints one JSON line:
GB/s (medians) of tensor files and of content-defined ones on one core and on all of them, and the ratio of
tensor files on one core to BLAKE3 alone over the same chunks.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import trio

sys.path.insert(0, str(Path(__file__).parents[1]))

from mounting import memory_folder
from small_face import SmallFace, small_face
from small_store import safetensors

from ckptfs.store.hashing import chunk_id
from ckptfs.store.inode import ROOT_INO

CHUNK_BYTES = 256 << 10
_PIECE_BYTES = 4 << 20


def content_of(mib: int, seed: int) -> bytes:
    """Bytes that nothing can be deduplicated in."""
    return b"".join(random.Random(f"{seed}.{n}").randbytes(1 << 20) for n in range(mib))


def stored_s(small: SmallFace, name: str, content: bytes) -> float:
    """Seconds from the close of a file to its version."""
    folder = small.face.mutations.make(ROOT_INO, name.encode(), 0o40755, 0, 0)
    trio.run(_written, small, folder, content)
    began = time.perf_counter()
    small.publish(name)
    took = time.perf_counter() - began
    small.remove(ROOT_INO, name)
    small.parts.index.commit()
    return took


async def _written(small: SmallFace, folder: int, content: bytes) -> None:
    files = small.face.files
    ino = small.face.mutations.create(folder, b"model.bin", 0o100644, 0, 0)
    for at in range(0, len(content), _PIECE_BYTES):
        await files.write(ino, at, content[at : at + _PIECE_BYTES])
    files.release(ino, write=True)


def alone_s(content: bytes) -> float:
    """Seconds of hashing the same bytes in chunks, in this thread."""
    view = memoryview(content)
    began = time.perf_counter()
    for at in range(0, len(content), CHUNK_BYTES):
        chunk_id(view[at : at + CHUNK_BYTES])
    return time.perf_counter() - began


def round_of(small: SmallFace, mib: int, number: int, cores: Iterable[int]) -> tuple[float, float, float]:
    """Bytes a second on these cores: tensors, content-defined, BLAKE3 alone (one thread)."""
    os.sched_setaffinity(0, cores)
    content = content_of(mib, number)
    tensors = safetensors({"w": content})
    return (
        len(tensors) / stored_s(small, f"tensors{number}", tensors),
        len(content) / stored_s(small, f"plain{number}", content_of(mib, -number)),
        len(content) / alone_s(content),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    logging.getLogger("ckptfs").setLevel(logging.ERROR)
    cores = sorted(os.sched_getaffinity(0))
    one: list[tuple[float, float, float]] = []
    several: list[tuple[float, float, float]] = []
    with memory_folder() as memory, small_face(memory / "store") as small:
        for number in range(1, asked.rounds + 1):
            one.append(round_of(small, asked.mib, 2 * number, cores[:1]))
            several.append(round_of(small, asked.mib, 2 * number + 1, cores))
    figures = {
        "tensors, one core": median(r[0] for r in one) / 1e9,
        "content-defined, one core": median(r[1] for r in one) / 1e9,
        "BLAKE3 alone, one core": median(r[2] for r in one) / 1e9,
        "tensors, one core, beside BLAKE3": median(r[0] / r[2] for r in one),
        f"tensors, {len(cores)} cores": median(r[0] for r in several) / 1e9,
        f"content-defined, {len(cores)} cores": median(r[1] for r in several) / 1e9,
    }
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}, indent=1))


if __name__ == "__main__":
    main()
