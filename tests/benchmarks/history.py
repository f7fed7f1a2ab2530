"""What versions cost: a publish of one changed file among 10,000, `log` of 10,000 versions, rollbacks.

    python tests/benchmarks/history.py [--rounds 9]

One rule: the store is on tmpfs and everything is measured inside one process that does nothing else, so the
figures are those of the daemon, without the kernel and the socket; the last ones are of the command and of a
real mount. Prints one JSON line; milliseconds, medians.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import trio

sys.path.insert(0, str(Path(__file__).parents[1]))

from mounting import Mount, memory_folder
from small_face import SmallFace, small_face
from synthetic_versions import roll_back, synthetic

from ckptfs.daemon.addresses import Address, Addresses
from ckptfs.daemon.queries import Facts, Queries
from ckptfs.store.health_log import HealthLog
from ckptfs.store.history import State, VersionRecord
from ckptfs.store.index import Change
from ckptfs.store.inode import ROOT_INO
from ckptfs.store.keyring import Keyring
from ckptfs.store.merge_log import MergeLog
from ckptfs.store.version_names import version_name
from ckptfs.store.writer_log import WriterLog

GIB = 1 << 30
FOLDERS, FILES = 100, 100
VERSIONS = 10_000


def milliseconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def publish_ms(rounds: int) -> float:
    """A publish after a change of one file of 4 KiB among 10,000 in 100 directories."""
    chance = random.Random(1)
    with memory_folder() as memory, small_face(memory / "store") as small:
        folders = {
            f"part{folder}": {f"shard-{number:05d}.bin": chance.randbytes(4096) for number in range(FILES)}
            for folder in range(FOLDERS)
        }
        small.make(ROOT_INO, {"run": folders})
        small.publish("run")
        small.parts.index.commit()
        taken = []
        for number in range(rounds):
            trio.run(small.write, small.at(f"run/part{number}"), "shard-00050.bin", chance.randbytes(4096))
            taken.append(milliseconds(lambda: small.publish("run")))
            small.parts.index.commit()
    return median(taken)


def rollback_ms(rounds: int, folders: int, files: int, file_bytes: int) -> float:
    """A rollback of folders × files files, all of which differ."""
    with memory_folder() as memory, small_face(memory / "store") as small:
        small.make(ROOT_INO, {"run": {}})
        versions = [synthetic(small, "run", folders, files, file_bytes, seed) for seed in (1, 2)]
        small.parts.index.commit()
        taken = []
        for number in range(rounds + 1):
            taken.append(milliseconds(lambda number=number: roll_back(small, ("run", versions[number % 2]))))  # type: ignore[misc]
            small.parts.index.commit()
    return median(taken[1:])


def log_ms(rounds: int) -> tuple[float, float]:
    """`ckptfs log` of 10,000 versions: the daemon's answer, and the whole command on a store."""
    with memory_folder() as memory:
        with small_face(memory / "store") as small:
            small.make(ROOT_INO, {"run": {"file": b"x"}})
            first = small.publish("run")
            _append(small, first)
            queries, address = _queries(small)
            inside = median(milliseconds(lambda: queries.log(address)) for _ in range(rounds))
        command = [
            sys.executable,
            "-m",
            "ckptfs.daemon",
            "log",
            "run",
            "--json",
            "--store",
            str(memory / "store"),
        ]
        whole = median(milliseconds(lambda: _quietly(command)) for _ in range(rounds))
    return inside, whole


def _queries(small: SmallFace) -> tuple[Queries, Address]:
    parts, face = small.parts, small.face

    async def facts() -> Facts:
        raise NotImplementedError("`log` needs none")

    addresses = Addresses(face.namespace, parts.histories, face.units.top_of)
    queries = Queries(
        parts.disk,
        face.namespace,
        parts.segments,
        parts.histories,
        addresses,
        face.units.is_top,
        facts,
        Keyring(),
        WriterLog(parts.disk, parts.index, parts.histories),
        MergeLog(parts.disk, parts.index, parts.histories),
        HealthLog(parts.disk, parts.index, parts.histories),
    )
    return queries, addresses.find("/run")


def _quietly(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)


def _append(small: SmallFace, first: VersionRecord) -> None:
    for number in range(2, VERSIONS + 1):
        unit = small.parts.histories.unit(first.unit)
        assert unit is not None
        time_ns = 10**18 + number * 10**9
        record = VersionRecord(
            unit=first.unit, number=number, name=version_name(number, time_ns), time_ns=time_ns,
            origin="quiet", top=first.top, root=first.root, files=1, logical_bytes=1,
            state=State.COMPLETE, step=number, steps=(number,), missing=(), before=unit.head,
        )  # fmt: skip
        change = Change()
        small.parts.histories.append_version(record, change)
        small.parts.index.apply(change)
    small.parts.index.commit()


def load_after_rollback_s(rounds: int) -> tuple[float, float]:
    """Reading a 1 GiB file whole: as it is, and as the first thing after a rollback brought it back."""
    with memory_folder() as memory:
        config = {"settle_s": 0.2}
        with Mount(memory / "mnt", memory / "store", logs=memory / "logs", config=config) as mount:
            path = mount.path / "run" / "model.bin"
            path.parent.mkdir()
            for seed in (1, 2):
                with path.open("wb") as file:
                    for _ in range(16):
                        file.write(random.Random(seed).randbytes(GIB // 16))
                mount.publish("run", timeout_s=120)
            plain, after = [], []
            for number in range(rounds):
                plain.append(milliseconds(lambda: _read(path)))
                after.append(
                    milliseconds(lambda number=number: (_roll_back(mount, number), _read(path)))  # type: ignore[misc]
                )
    return median(plain) / 1000, median(after) / 1000


def _roll_back(mount: Mount, number: int) -> None:
    mount.cli("rollback", str(mount.path / "run"), "--to", str(1 + number % 2))


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(4 << 20)
        while file.readinto(buffer):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    logging.getLogger("ckptfs").setLevel(logging.ERROR)
    inside, command = log_ms(rounds)
    plain, after = load_after_rollback_s(rounds)
    figures = {
        "publish 1 file of 10,000, ms": publish_ms(rounds),
        "rollback 100 files of 20 GB, ms": rollback_ms(rounds, 1, 100, 200 << 20),
        "rollback 10,000 files, ms": rollback_ms(rounds, FOLDERS, FILES, 4096),
        "log of 10,000 versions, ms": inside,
        "`ckptfs log` of 10,000 versions on a store, ms": command,
        "read 1 GiB, s": plain,
        "rollback and read 1 GiB, s": after,
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}, indent=1))


if __name__ == "__main__":
    main()
