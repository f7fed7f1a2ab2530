"""Files as any program writes them: a lot of bytes, or a lot of names."""

from __future__ import annotations

import argparse
import hashlib
import random
from pathlib import Path

from protocol import emit

BLOCK_BYTES = 1024 * 1024


def write_bytes(folder: Path, total_bytes: int, file_bytes: int, seed: int) -> None:
    """Files of incompressible, never repeating bytes; says the SHA-256 of each."""
    block = bytearray(random.Random(seed).randbytes(BLOCK_BYTES))
    for number in range(total_bytes // file_bytes):
        hasher = hashlib.sha256()
        with (folder / f"{number:04}.bin").open("wb", buffering=0) as file:
            for place in range(0, file_bytes, BLOCK_BYTES):
                _mark(block, number * file_bytes + place)
                hasher.update(block)
                file.write(block)
        emit(event="saved", path=f"{number:04}.bin", files={"": hasher.hexdigest()})


def write_names(folder: Path, count: int) -> None:
    """Small files in one directory."""
    for number in range(count):
        (folder / f"sample-{number:06}.txt").write_text(f"{number}\n")


def _mark(block: bytearray, place: int) -> None:
    """Make every 16 KiB of the block differ from all others of the run."""
    for start in range(0, len(block), 16 * 1024):
        block[start : start + 8] = (place + start).to_bytes(8, "little")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bytes", type=int, default=0)
    parser.add_argument("--file-bytes", type=int, default=256 * 1024 * 1024)
    parser.add_argument("--names", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir()
    write_bytes(options.folder, options.bytes, options.file_bytes, options.seed)
    write_names(options.folder, options.names)


if __name__ == "__main__":
    main()
