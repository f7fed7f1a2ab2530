"""How fast encoded saves are read through the mount, and what a writer feels of the encoder.

    python tests/benchmarks/warm_speed.py [--mib 192] [--rounds 9] [--only load,random,writer] [--json FILE]

A run of ten .pt saves, each weights that changed a little, of which nine are encoded: the first stands alone,
and the others are differences to it (store/chain_shape.py). One rule: the store lies in memory, and so do the
files that `native` reads; a round reads or writes on both sides, one behind the other, and nothing that it
reads is in the page cache of the mount. The codecs' own rates on one core: tests/benchmarks/codecs.py.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from asking import DAEMON
from client_run import run_client
from mounting import Mount, memory_folder
from report import Figure, save, show

LOAD, RANDOM_S, WRITER = 0.4, 0.025, 0.95
"""Goals: torch.load to native's, a random MiB, a save beside the encoder to one without it."""
_SAVES = 10
_ENCODED = {"alone": 1, "to the save before": 2, "to the eighth before": 9}
"""Saves by what they are encoded against."""
_TENSOR_VALUES = 4 << 20
_MIB = 1 << 20
_LIMIT_S = 1800.0
_CONFIG = {"settle_s": 3600.0, "settle_max_s": 7200.0, "encode_after_s": "never"}


def make_saves(folder: Path, mib: int) -> list[Path]:
    """The files as a job would save them, each in a directory of its own."""
    torch.manual_seed(1)
    weights = {
        f"layer.{number}.weight": torch.randn(_TENSOR_VALUES // 1024, 1024) * 0.02
        for number in range(max(1, mib * _MIB // (4 * _TENSOR_VALUES)))
    }
    paths = []
    for step in range(1, _SAVES + 1):
        for weight in weights.values():
            weight += torch.randn(1024) * 4e-6
        path = folder / f"checkpoint-{step}" / "model.pt"
        path.parent.mkdir(parents=True)
        torch.save({"model": weights, "step": step}, path)
        paths.append(path)
    return paths


def forget(path: Path) -> None:
    """Nothing of a file stays in the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def loads(mount: Mount, native: Path, rounds: int) -> Iterator[Figure]:
    """torch.load of encoded saves."""
    for against, number in _ENCODED.items():
        name = f"checkpoint-{number}"
        size = (native / name / "model.pt").stat().st_size
        figure = Figure(f"torch.load, {against}", "ckptfs auto", goal=LOAD, data_bytes=size)
        for _ in range(rounds):
            figure.native_s.append(run_client("load_torch", native / name, "")[0])
            forget(mount.path / "run" / name / "model.pt")
            wall_s, cpu_s = run_client("load_torch", mount.path / "run" / name, "")
            figure.seconds.append(wall_s)
            figure.client_cpu_s.append(cpu_s)
        yield figure


def random_reads(mount: Mount, rounds: int) -> Iterator[Figure]:
    """1 MiB at offsets drawn anew, each after the cache was dropped."""
    draw = random.Random(1)
    for against, number in _ENCODED.items():
        path = mount.path / "run" / f"checkpoint-{number}" / "model.pt"
        figure = Figure(f"random 1 MiB, {against}", "ckptfs auto", goal=RANDOM_S, in_seconds=True)
        for _ in range(rounds * 5):
            forget(path)
            fd = os.open(path, os.O_RDONLY)
            offset = draw.randrange(path.stat().st_size - _MIB)
            began = time.perf_counter()
            content = b""
            while len(content) < _MIB:
                content += os.pread(fd, _MIB - len(content), offset + len(content))
            figure.seconds.append(time.perf_counter() - began)
            os.close(fd)
        yield figure


def writers(mount: Mount, native: Path, rounds: int) -> Iterator[Figure]:
    """A job saves while nothing is encoded, then while the saves before are, as fast as it goes."""
    source = native / "checkpoint-1"
    size = (source / "model.pt").stat().st_size
    figure = Figure("a save while others are encoded", "ckptfs auto", goal=WRITER, data_bytes=size)
    for seconds in (figure.native_s, figure.seconds):
        encoder = _encoding(mount) if seconds is figure.seconds else None
        time.sleep(2.0)  # it has begun
        for number in range(rounds):
            target = mount.path / "other" / f"save-{number}"
            seconds.append(run_client("copy_in", target, str(source))[0])
            shutil.rmtree(target)
        if encoder is not None:
            assert encoder.poll() is None, "it still encodes; give it more with --mib"
            encoder.terminate()
            encoder.wait(60)
    yield figure


def _encoding(mount: Mount) -> subprocess.Popen[bytes]:
    command = [*DAEMON, "encode", str(mount.path / "run"), "--json"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=mount.environment)


def fill(mount: Mount, paths: list[Path], *, is_encoded: bool) -> None:
    """Save all, one version each."""
    (mount.path / "run").mkdir()
    (mount.path / "other").mkdir()
    for path in paths:
        target = mount.path / "run" / path.parent.name
        target.mkdir()
        shutil.copyfile(path, target / path.name)
        mount.publish("run", timeout_s=_LIMIT_S)
    if is_encoded:
        mount.cli("encode", str(mount.path / "run"), timeout_s=_LIMIT_S)


def measured(mib: int, rounds: int, only: set[str]) -> Iterator[Figure]:
    """All figures that are wanted."""
    with memory_folder() as memory:
        paths = make_saves(memory / "native", mib)
        if only & {"load", "random"}:
            with Mount(
                memory / "mnt", memory / "store", logs=memory / "logs", config=_CONFIG, limit_s=_LIMIT_S
            ) as mount:
                fill(mount, paths, is_encoded=True)
                if "load" in only:
                    yield from loads(mount, memory / "native", rounds)
                if "random" in only:
                    yield from random_reads(mount, rounds)
            shutil.rmtree(memory / "store")
        if "writer" in only:
            with Mount(
                memory / "mnt", memory / "store", logs=memory / "logs", config=_CONFIG, limit_s=_LIMIT_S
            ) as mount:
                fill(mount, paths, is_encoded=False)
                yield from writers(mount, memory / "native", rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="load,random,writer")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    figures = []
    for figure in measured(asked.mib, asked.rounds, set(asked.only.split(","))):
        print(figure.name, round(median(figure.seconds), 4), figure.ratio, figure.holds, flush=True)
        figures.append(figure)
    show(figures)
    if asked.json is not None:
        save(figures, asked.json)


if __name__ == "__main__":
    main()
