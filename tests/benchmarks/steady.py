"""History in steady state: a job saves every few seconds, versions go by policy, what is older gets encoded.

    python tests/benchmarks/steady.py OUT [--saves 60] [--mib 1024] [--every 30] [--keep-last 20]
        [--encode-after 0] [--write-path auto] [--folder DIR]

Writes OUT.svg (what is stored, the time of each save, the backlogs) and OUT.json, and prints a summary. The
whole run takes half an hour; `--saves 60 --mib 128 --every 5` takes five minutes. A save is one safetensors
file of float32 that changes a little each time, as AdamW's weights do, written beside the last one, synced
and renamed over it. One rule: the job's clock goes on whatever the store does; a save that comes late is
counted as late.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from mounting import Mount
from svg_chart import Panel, write_chart

_LIMIT_S = 7200.0
_LOOK_EVERY_S = 1.0
_TENSOR_VALUES = 4 << 20
_MIB = 1 << 20
_STEP = np.float32(2e-4)


@dataclass(slots=True)
class Course:
    """What was seen: of each save (when it was due, how late it began, seconds), and each second the stored
    bytes, what waits to be ingested and encoded, and the daemon's memory."""

    saves: list[tuple[float, float, float]] = field(default_factory=list)
    stored: list[tuple[float, float]] = field(default_factory=list)
    ingest: list[tuple[float, float]] = field(default_factory=list)
    encode: list[tuple[float, float]] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)


class Job:
    """Weights that change, and their file."""

    def __init__(self, mib: int) -> None:
        draw = np.random.default_rng(1)
        values = mib * _MIB // 4
        self._weights = draw.standard_normal(values, np.float32) * np.float32(0.02)
        # Drawn once: to draw anew each time would take longer than to save.
        self._changes = draw.standard_normal(_TENSOR_VALUES + 4096, np.float32) * np.float32(0.02) * _STEP
        self._step = 0
        header, at = {}, 0
        for number, start in enumerate(range(0, values, _TENSOR_VALUES)):
            size = 4 * min(_TENSOR_VALUES, values - start)
            header[f"layer.{number}.weight"] = {
                "dtype": "F32",
                "shape": [size // 4],
                "data_offsets": [at, at + size],
            }
            at += size
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._header = len(encoded).to_bytes(8, "little") + encoded

    def train(self) -> None:
        """All weights change by about a thousandth of what they are."""
        self._step += 1
        for start in range(0, len(self._weights), _TENSOR_VALUES):
            part = self._weights[start : start + _TENSOR_VALUES]
            shift = (self._step * 389 + start // _TENSOR_VALUES * 97) % 4096
            part += self._changes[shift : shift + len(part)]

    def save(self, path: Path) -> None:
        """As a careful job does."""
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb", buffering=0) as file:
            file.write(self._header)
            payload = memoryview(self._weights).cast("B")
            for at in range(0, len(payload), 4 * _MIB):
                file.write(payload[at : at + 4 * _MIB])
            os.fsync(file.fileno())
        temporary.rename(path)

    def weights(self) -> npt.NDArray[np.float32]:
        return self._weights


@contextmanager
def watched(mount: Mount, course: Course, began: float) -> Iterator[None]:
    """Look at the daemon each second, as a monitoring would."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK_EVERY_S):
            status = mount.facts("status", str(mount.path))
            now = time.monotonic() - began
            encoding = status["encoding"]
            assert isinstance(encoding, dict)
            course.stored.append((now, int(str(status["stored_bytes"])) / _MIB))
            course.ingest.append((now, int(str(status["ingest_pending_bytes"])) / _MIB))
            course.encode.append((now, encoding["pending_bytes"] / _MIB))
            course.memory.append((now, mount.rss_anon_bytes() / _MIB))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def ran(mount: Mount, asked: argparse.Namespace) -> Course:
    """The whole run, and until nothing waits any more."""
    course, job = Course(), Job(asked.mib)
    path = mount.path / "run" / "model.safetensors"
    path.parent.mkdir()
    began = time.monotonic()
    with watched(mount, course, began):
        for number in range(asked.saves):
            job.train()
            due = number * asked.every
            time.sleep(max(0.0, began + due - time.monotonic()))
            start = time.monotonic()
            job.save(path)
            course.saves.append((due, start - began - due, time.monotonic() - start))
        until = time.monotonic() + 20 * asked.every + 60
        quiet = 0
        while quiet < 5 and time.monotonic() < until:
            time.sleep(1)
            quiet = quiet + 1 if course.encode[-1][1] == course.ingest[-1][1] == 0 else 0
    with path.open("rb") as file:
        content = file.read()
    assert content.endswith(memoryview(job.weights()).cast("B")), "the last save reads as it was written"
    return course


def summary(course: Course, asked: argparse.Namespace) -> dict[str, float]:
    """The figures that say whether it is steady."""
    third = max(1, len(course.saves) // 3)
    seconds = [one[2] for one in course.saves]
    full = course.saves[min(asked.keep_last, len(course.saves) - 1)][0]
    last = course.saves[-1][0]
    steady = [y for x, y in course.stored if full <= x <= last] or [0.0]
    ends = [y for x, y in course.stored if x > last] or [0.0]
    return {
        "save, first third, median s": median(seconds[:third]),
        "save, last third, median s": median(seconds[-third:]),
        "save, most s": max(seconds),
        "late, most s": max(one[1] for one in course.saves),
        "stored once full, least MiB": min(steady),
        "stored once full, most MiB": max(steady),
        "stored at the end, MiB": ends[-1],
        "stored raw would be, MiB": asked.mib * min(asked.keep_last, asked.saves),
        "waits for ingest, most MiB": max((y for _, y in course.ingest), default=0),
        "waits for encoding, most MiB": max((y for _, y in course.encode), default=0),
        "waits for encoding at the end, MiB": course.encode[-1][1],
        "daemon's memory, most MiB": max((y for _, y in course.memory), default=0),
    }


def draw(course: Course, path: Path, asked: argparse.Namespace) -> None:
    """The chart."""
    raw = [
        (x, float(asked.mib * min(number + 1, asked.keep_last)))
        for number, (x, _, _) in enumerate(course.saves)
    ]
    panels = [
        Panel("stored, MiB", {"stored": course.stored, "raw would be": raw}),
        Panel("seconds of each save", {"save": [(x, s) for x, _, s in course.saves]}, dots=True),
        Panel("waits, MiB", {"for ingest": course.ingest, "for encoding": course.encode}),
        Panel("memory of the daemon, MiB", {"RssAnon": course.memory}),
    ]
    write_chart(path, panels, "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--saves", type=int, default=60)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--every", type=float, default=30)
    parser.add_argument("--keep-last", type=int, default=20)
    parser.add_argument("--encode-after", default="0", help='seconds, or "never"')
    parser.add_argument("--write-path", choices=["auto", "plain"], default="auto")
    parser.add_argument("--folder", type=Path, help="where the store is (else the usual temporary folder)")
    asked = parser.parse_args()
    after = asked.encode_after if asked.encode_after == "never" else float(asked.encode_after)
    config = {
        "write_path": asked.write_path,
        "encode_after_s": after,
        "policy": [{"path": "/*", "keep_last": asked.keep_last}],
    }
    with TemporaryDirectory(prefix="ckptfs-steady-", dir=asked.folder) as name:
        home = Path(name)
        with Mount(home / "mnt", home / "store", logs=home, config=config, limit_s=_LIMIT_S) as mount:
            course = ran(mount, asked)
    figures = summary(course, asked)
    settings = {key: str(value) for key, value in vars(asked).items()}
    written = {"settings": settings, "figures": figures, "saves": course.saves, "stored_mib": course.stored}
    written |= {"ingest_mib": course.ingest, "encode_mib": course.encode, "memory_mib": course.memory}
    asked.out.with_suffix(".json").write_text(json.dumps(written) + "\n")
    draw(course, asked.out.with_suffix(".svg"), asked)
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}, indent=1))


if __name__ == "__main__":
    main()
