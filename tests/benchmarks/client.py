"""What a job does, in a process of its own: `python client.py ACTION PATH [ARGUMENT]`.

Prints the seconds and the CPU seconds that it took.

One rule: only the action itself is timed, not the start of the interpreter or an import.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

BLOCK_BYTES = 4 << 20
COUNT = 10_000


def copy_in(target: Path, source: str) -> None:
    """`cp` of a checkpoint set, file by file, into a new directory."""
    target.mkdir(parents=True)
    for path in sorted(Path(source).iterdir()):
        _write_whole(path, target / path.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


def overwrite(target: Path, source: str) -> None:
    """The same onto files that are there, in place: blocks that are allocated stay."""
    for path in sorted(Path(source).iterdir()):
        _write_whole(path, target / path.name, os.O_WRONLY)


def _write_whole(source: Path, target: Path, flags: int, *, sync: bool = False) -> None:
    reader = os.open(source, os.O_RDONLY)
    writer = os.open(target, flags, 0o644)
    buffer = memoryview(bytearray(BLOCK_BYTES))
    while length := os.readv(reader, [buffer]):
        os.write(writer, buffer[:length])
    if sync:
        os.fsync(writer)
    os.close(writer)
    os.close(reader)


def save_synced(target: Path, source: str) -> None:
    """Copies a set file by file into a new directory; each file is synced before it is closed."""
    target.mkdir(parents=True)
    for path in sorted(Path(source).iterdir()):
        _write_whole(path, target / path.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, sync=True)


def read(target: Path, _: str) -> None:
    """Every byte, by read(2)."""
    buffer = bytearray(BLOCK_BYTES)
    for path in sorted(target.iterdir()):
        fd = os.open(path, os.O_RDONLY)
        while os.readv(fd, [buffer]):
            pass
        os.close(fd)


def read_mapped(target: Path, _: str) -> None:
    """Every byte, through a mapping."""
    buffer = bytearray(BLOCK_BYTES)
    for path in sorted(target.iterdir()):
        with path.open("rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            for start in range(0, len(mapping), BLOCK_BYTES):
                part = mapping[start : start + BLOCK_BYTES]
                buffer[: len(part)] = part


def load_torch(target: Path, _: str) -> None:
    """torch.load of the set's .pt file."""
    _torch().load(next(target.glob("*.pt")), weights_only=True)


def load_safetensors(target: Path, _: str) -> None:
    """load_file of the set's .safetensors file, every tensor touched."""
    for tensor in _load_file()(next(target.glob("*.safetensors"))).values():
        tensor.sum()


def create_small(target: Path, _: str) -> None:
    """Create, write 4 KiB, close; 1,000 times."""
    target.mkdir(parents=True)
    for number in range(1000):
        fd = os.open(target / f"{number:06d}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(fd, bytes(4096))
        os.close(fd)


def make_names(target: Path, _: str) -> None:
    """10,000 files of one byte."""
    target.mkdir(parents=True)
    for number in range(COUNT):
        (target / f"{number:06d}").write_bytes(b"x")


def stat_warm(target: Path, _: str) -> None:
    """stat of one file, 100,000 times."""
    path = next(target.iterdir())
    for _ in range(100_000):
        os.stat(path)


def list_long(target: Path, _: str) -> None:
    """What `ls -l` asks for."""
    for entry in os.scandir(target):
        entry.stat(follow_symlinks=False)


def remove(target: Path, _: str) -> None:
    """rm -rf."""
    shutil.rmtree(target)


def untar(target: Path, archive: str) -> None:
    """A source tree out of an archive."""
    with tarfile.open(archive) as f:
        f.extractall(target, filter="data")


def _torch() -> object:
    import torch

    return torch


def _load_file() -> Callable[[Path], dict[str, object]]:
    from safetensors.torch import load_file

    return load_file


ACTIONS: dict[str, Callable[[Path, str], None]] = {
    action.__name__: action
    for action in (
        copy_in,
        overwrite,
        save_synced,
        read,
        read_mapped,
        load_torch,
        load_safetensors,
        create_small,
        make_names,
        stat_warm,
        list_long,
        remove,
        untar,
    )
}


def main() -> None:
    name, path, *rest = sys.argv[1:]
    if name == "load_torch":
        _torch()
    if name == "load_safetensors":
        _load_file()
    started, cpu_s = time.perf_counter(), time.process_time()
    ACTIONS[name](Path(path), rest[0] if rest else "")
    print(time.perf_counter() - started, time.process_time() - cpu_s)


if __name__ == "__main__":
    main()
