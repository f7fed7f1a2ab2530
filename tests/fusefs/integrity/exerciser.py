"""A data-integrity exerciser in the manner of fsx: random operations on one file against a byte array.

The one rule: every byte that comes back is compared with what was written, at once. Operations depend on the
seed only, not on time, so that a difference can be met again. A descriptor that only reads a file of tensors
may keep the bytes that it opened (SEMANTICS.md, "Write paths"): then all, and for ever. A command of its own:

    python exerciser.py DIRECTORY --operations 1000000 --seed 7
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from small_store import safetensors

MAX_BYTES = 600_000
LEAST_TENSOR_BYTES, TENSOR_BYTES = 1 << 20, 5 << 18
REMEMBERED = 40
PUBLISH_S = 60.0
_FLAGS = (os.O_RDWR, os.O_RDWR, os.O_WRONLY, os.O_RDONLY, os.O_RDWR | os.O_APPEND)


class Difference(AssertionError):
    """The file has other bytes than were written."""


class Publisher:
    """Asks for versions of a directory on ckptfs, from a thread: `mkdir DIR/.versions/NAME`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pool = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None
        self.made = 0

    def publish(self, *, wait: bool) -> None:
        """Begin a publish when the one before has ended; with `wait`, see it end."""
        if self._running is not None:
            self._running.result(PUBLISH_S)
        self._running = self._pool.submit(self._make, f"t{os.getpid()}-{self.made}")
        self.made += 1
        if wait:
            self._running.result(PUBLISH_S)

    def close(self) -> None:
        """See the last one end. Another publish may follow."""
        if self._running is not None:
            self._running.result(PUBLISH_S)
        self._running = None

    def _make(self, name: str) -> None:
        try:
            os.mkdir(self._directory / ".versions" / name)
        except FileNotFoundError:
            pass  # nothing to publish yet: everything is being written


@dataclass(slots=True)
class Opened:
    """What the file held when a descriptor of it was opened to read; `keeps` is None until it is known
    whether the descriptor keeps that."""

    content: bytes
    keeps: bool | None = None


class Exerciser:
    """One file under test, its handles and mappings, and what it must contain. With `tensors` its new
    contents are large files of tensors."""

    def __init__(
        self, path: Path, rng: random.Random, handles: int, *, publish: bool = False, tensors: bool = False
    ) -> None:
        self.path = path
        self._publisher = Publisher(path.parent) if publish else None
        self.counts: Counter[str] = Counter()
        self._rng = rng
        self._handles = handles
        self._expected = bytearray()
        self._open: dict[int, int] = {}
        self._opened: dict[int, Opened] = {}
        self._tensors = tensors
        self._most_bytes = TENSOR_BYTES if tensors else MAX_BYTES
        self._mapping: mmap.mmap | None = None
        self._blocks = [rng.randbytes(4096) for _ in range(4)]
        self._recent: deque[str] = deque(maxlen=REMEMBERED)
        path.write_bytes(b"")
        self._choices: list[tuple[float, Callable[[], str]]] = [
            (20, self._read),
            (20, self._write),
            (6, self._append),
            (6, self._map_read),
            (6, self._map_write),
            (6, self._truncate),
            (6, self._reopen),
            (3, self._read_all_parts),
            (2, self._sync),
            (2, self._copy_range),
            (0.5, self._truncate_at_open),
            (0.5, self._close_all),
            (0.5, self._replace),
            (1.5, self._publish),
            (2 if tensors else 0, self._save_and_read),
        ]

    def run(self, operations: int, deadline_s: float | None = None) -> int:
        """Do that many operations, fewer if `deadline_s` (monotonic) comes first; returns how many."""
        weights = [weight for weight, _ in self._choices]
        steps = [step for _, step in self._choices]
        for number in range(operations):
            step = self._rng.choices(steps, weights)[0]
            self.counts[step.__name__] += 1
            self._recent.append(f"{number} {step.__name__[1:]}")
            self._recent[-1] += " " + step()
            if number % 64 == 0 and deadline_s is not None and time.monotonic() > deadline_s:
                return number
        return operations

    def finish(self) -> None:
        """Close everything and compare the whole file once more."""
        self._close_all()
        if self._publisher is not None:
            self._publisher.close()
        self._compare(self.path.read_bytes(), 0, "whole file after the last close")

    # -- steps: each returns what is remembered of it -----------------------------------------

    def _read(self) -> str:
        offset, length = self._range(len(self._expected) + 5000)
        self._compare_read(self._handle(os.O_RDONLY), offset, "pread", length)
        return f"{offset}+{length}"

    def _write(self) -> str:
        offset, length = self._range(self._most_bytes)
        payload = self._payload(length)
        fd = self._handle(os.O_WRONLY, append=False)
        assert os.pwrite(fd, payload, offset) == length
        self._expect(offset, payload)
        return f"{offset}+{length} {_kind(self._open[fd])}"

    def _append(self) -> str:
        payload = self._payload(self._rng.randrange(1, 9000))
        if len(self._expected) + len(payload) > self._most_bytes:
            return "too long"
        fd = self._handle(os.O_WRONLY, append=True)
        assert os.write(fd, payload) == len(payload)
        self._expect(len(self._expected), payload)
        return str(len(payload))

    def _map_read(self) -> str:
        if self._mapping is None:
            self._mapping = self._map()
        if self._mapping is None:
            return "empty"
        offset, length = self._range(len(self._mapping))
        part = self._mapping[offset : offset + length]
        self._compare(part, offset, "mapping", min(length, len(self._mapping) - offset))
        return f"{offset}+{length}"

    def _map_write(self) -> str:
        if self._mapping is None:
            self._mapping = self._map()
        if self._mapping is None:
            return "empty"
        offset, length = self._range(len(self._mapping))
        payload = self._payload(min(length, len(self._mapping) - offset))
        self._mapping[offset : offset + len(payload)] = payload
        self._expect(offset, payload)
        if self._rng.random() < 0.3:
            self._mapping.flush()
        return f"{offset}+{len(payload)}"

    def _truncate(self) -> str:
        size = self._rng.choice((0, self._rng.randrange(self._most_bytes), self._near(len(self._expected))))
        self._fit_mapping(size)
        if self._rng.random() < 0.5:
            os.truncate(self.path, size)
        else:
            os.ftruncate(self._handle(os.O_WRONLY), size)
        self._resize(size)
        return str(size)

    def _reopen(self) -> str:
        if self._open and (len(self._open) >= self._handles or self._rng.random() < 0.5):
            fd = self._rng.choice(list(self._open))
            self._close(fd)
            return f"closed {fd}"
        return f"opened {self._another(self._rng.choice(_FLAGS))}"

    def _read_all_parts(self) -> str:
        part_bytes = self._rng.choice((4096, 65_536, 131_072))
        fd = self._handle(os.O_RDONLY)
        for offset in range(0, len(self._expected), part_bytes):
            self._compare_read(fd, offset, "sequential", part_bytes)
        size = len(self._expected_of(fd))
        assert os.fstat(fd).st_size == size, f"size {os.fstat(fd).st_size} for {size}\n{self._story()}"
        return str(part_bytes)

    def _sync(self) -> str:
        os.fsync(self._handle(os.O_WRONLY))
        return ""

    def _copy_range(self) -> str:
        if not self._expected:
            return "empty"
        source, length = self._range(len(self._expected))
        length = min(length, len(self._expected) - source)
        target = self._rng.randrange(self._most_bytes)
        if source < target + length and target < source + length:
            return "overlap"
        fd = self._handle(os.O_RDWR, append=False)
        copied = os.copy_file_range(fd, fd, length, source, target)
        self._expect(target, bytes(self._expected[source : source + copied]))
        return f"{source}+{copied} to {target}"

    def _truncate_at_open(self) -> str:
        self._fit_mapping(0)
        self._another(os.O_RDWR | os.O_TRUNC)
        self._resize(0)
        return ""

    def _close_all(self) -> str:
        self._forget_mapping()
        for fd in list(self._open):
            self._close(fd)
        return ""

    def _publish(self) -> str:
        """A version now, mostly while nobody holds the file, so that it is ingested; or meanwhile."""
        if self._publisher is None:
            return "not here"
        readers_stay = self._rng.random() < 0.3
        self._forget_mapping()
        for fd, flags in list(self._open.items()):
            if not (readers_stay and flags & os.O_ACCMODE == os.O_RDONLY):
                self._close(fd)
        waits = self._rng.random() < 0.6
        self._publisher.publish(wait=waits)
        return "and wait" if waits else "meanwhile"

    def _replace(self) -> str:
        """A new file in its place. Old handles go on with the old one, so they are closed before."""
        self._close_all()
        temporary = self.path.with_suffix(".tmp")
        content = self._saved()
        temporary.write_bytes(content)
        temporary.rename(self.path)
        self._expected = bytearray(content)
        return str(len(content))

    def _save_and_read(self) -> str:
        """A save that is stored and then read, so often that the daemon sees that the kernel can read it."""
        self._replace()
        if self._publisher is not None:
            self._publisher.publish(wait=True)
        for _ in range(3):
            self._compare(self.path.read_bytes(), 0, "stored")
        self._another(os.O_RDONLY)
        return self._read()

    # -- what they share ----------------------------------------------------------------------

    def _range(self, limit: int) -> tuple[int, int]:
        length = self._rng.choice((self._rng.randrange(1, 64), 4096, self._rng.randrange(1, 70_000)))
        offset = self._rng.randrange(max(1, limit))
        if self._rng.random() < 0.3:
            offset = offset // 4096 * 4096
        return offset, max(1, min(length, limit - offset))

    def _near(self, size: int) -> int:
        return min(self._most_bytes, max(0, size + self._rng.randrange(-5000, 5000)))

    def _payload(self, length: int) -> bytes:
        """Bytes that differ, or repeat blocks that chunks elsewhere have too."""
        if self._rng.random() < 0.3:
            return (self._rng.choice(self._blocks) * (length // 4096 + 1))[:length]
        return self._rng.randbytes(length)

    def _handle(self, access: int, *, append: bool | None = None) -> int:
        """An open descriptor that allows `access`; opens one if there is none."""
        able = [fd for fd, flags in self._open.items() if _allows(flags, access, append)]
        if able:
            return self._rng.choice(able)
        flags = os.O_RDWR if access != os.O_RDONLY else access
        return self._another(flags | (os.O_APPEND if append else 0))

    def _another(self, flags: int) -> int:
        fd = os.open(self.path, flags)
        self._open[fd] = flags
        if self._tensors and flags & os.O_ACCMODE == os.O_RDONLY:
            self._opened[fd] = Opened(bytes(self._expected))
        return fd

    def _close(self, fd: int) -> None:
        del self._open[fd]
        opened = self._opened.pop(fd, None)
        self.counts["kept"] += opened is not None and opened.keeps is True
        os.close(fd)

    def _expected_of(self, fd: int) -> bytes | bytearray:
        """What a descriptor must show, if it was seen already whether it keeps what it opened."""
        opened = self._opened.get(fd)
        if opened is None or opened.content == self._expected:
            return self._expected
        if opened.keeps is None:
            opened.keeps = os.pread(fd, self._most_bytes + 1, 0) == opened.content
        return opened.content if opened.keeps else self._expected

    def _saved(self) -> bytes:
        """A new content of the whole file."""
        if not self._tensors:
            return self._payload(self._rng.randrange(MAX_BYTES))
        size = self._rng.randrange(LEAST_TENSOR_BYTES, TENSOR_BYTES - 200)
        return safetensors({"w": self._rng.randbytes(size // 4 * 4)})

    def _compare_read(self, fd: int, offset: int, by: str, length: int) -> None:
        found = os.pread(fd, length, offset)
        self._compare(found, offset, by, length, self._expected_of(fd))

    def _map(self) -> mmap.mmap | None:
        size = len(self._expected)
        if not size:
            return None
        fd = self._handle(os.O_RDWR)
        return mmap.mmap(fd, size, mmap.MAP_SHARED)

    def _fit_mapping(self, size: int) -> None:
        """A mapping beyond the end of its file would be SIGBUS."""
        if self._mapping is not None and (size < len(self._mapping) or self._rng.random() < 0.3):
            self._forget_mapping()

    def _forget_mapping(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    def _resize(self, size: int) -> None:
        del self._expected[size:]
        self._expected.extend(bytes(size - len(self._expected)))

    def _expect(self, offset: int, payload: bytes) -> None:
        if offset > len(self._expected):
            self._resize(offset)
        self._expected[offset : offset + len(payload)] = payload

    def _compare(
        self,
        found: bytes,
        offset: int,
        by: str,
        length: int | None = None,
        content: bytes | bytearray | None = None,
    ) -> None:
        content = self._expected if content is None else content
        end = len(content) if length is None else offset + length
        expected = content[offset:end]
        if found == expected:
            return
        pairs = zip(found, expected, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
        said = (
            f"{by} at {offset}: {len(found)} bytes for {len(expected)}, first difference at {offset + first}"
        )
        zeros = "; zeros there" if not any(found[first : first + 512]) else ""
        raise Difference(f"{said}{zeros}\n{self._story()}")

    def _story(self) -> str:
        return "\n".join(self._recent)


def _allows(flags: int, access: int, append: bool | None) -> bool:
    mode = flags & os.O_ACCMODE
    if append is not None and bool(flags & os.O_APPEND) != append:
        return False
    return mode == os.O_RDWR or mode == access


def _kind(flags: int) -> str:
    return {os.O_RDONLY: "r", os.O_WRONLY: "w", os.O_RDWR: "rw"}[flags & os.O_ACCMODE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--handles", type=int, default=6)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--tensors", action="store_true", help="save files of tensors")
    parser.add_argument("--publish", action="store_true", help="make versions of it: it is on ckptfs")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    started = time.monotonic()
    path, rng = options.directory / "exercised.bin", random.Random(options.seed)
    exerciser = Exerciser(path, rng, options.handles, publish=options.publish, tensors=options.tensors)
    done = exerciser.run(options.operations)
    exerciser.finish()
    print(f"{done} operations without a difference in {time.monotonic() - started:.0f} s: {exerciser.counts}")


if __name__ == "__main__":
    sys.exit(main())
