"""What encoded history takes, through a mount, beside borg, restic and ZipNN on the same real training.

    python tests/benchmarks/warm_tier.py FOLDER [--write-path auto|plain|both] [--zipnn PYTHON] [--json FILE]

FOLDER holds the series of tests/benchmarks/training.py. Each is saved into a mount, save by save, with a
small later save behind it, so that all of it is history; then `ckptfs encode`. One rule: a figure counts if
each byte of the live tree and of every version is the same after it, and after a restart. Ratios are logical
bytes over what is stored for them: of ckptfs the payloads (`du`), of borg and restic the files of their
repository, of ZipNN the compressed files. ZipNN is run by PYTHON, an interpreter that has it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from codecs_series import SERIES, saves_of
from mounting import Mount, memory_folder

from ckptfs.daemon.encoding_files import LEAST_FILE_BYTES
from ckptfs.store.encoding_plan import path_key

LIMIT_S = 1800.0
_LAST_STEP = "999999999"
_LATER = os.urandom(LEAST_FILE_BYTES)
"""A later save; a smaller file is none, so that a broken one does not make the good one history."""
_ZIPNN = """
import sys, zipnn
total = 0
for line in sys.stdin:
    path = line.rstrip("\\n")
    dtype = "bfloat16" if "bf16" in path else "float32"
    with open(path, "rb") as file:
        content = file.read()
    coder = zipnn.ZipNN(bytearray_dtype=dtype, input_format="byte")
    packed = coder.compress(bytearray(content))
    assert bytes(coder.decompress(packed)) == content, path
    total += len(packed)
print(total)
"""


@dataclass(slots=True)
class Result:
    """One series: bytes in all, and what each keeps for them."""

    name: str
    goal: float | None
    logical: int = 0
    stored: dict[str, int] = field(default_factory=dict)
    by_codec: dict[str, object] = field(default_factory=dict)

    def ratio(self, who: str) -> float | None:
        """Logical over stored."""
        return self.logical / self.stored[who] if who in self.stored else None


def digests(top: Path) -> dict[str, str]:
    """SHA-256 of every file below a directory, and of those of its versions."""
    found: dict[str, str] = {}
    versions = [
        one for one in (top / ".versions").iterdir() if one.name.startswith("v") and not one.is_symlink()
    ]
    for place in (top, *versions):
        for path in sorted(place.rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                found[f"{place.name}/{path.relative_to(place)}"] = digest
    return found


def copy_in(folder: Path, paths: Iterable[Path], target: Path) -> int:
    """Copy the files of a save; their bytes."""
    size = 0
    for path in paths:
        there = target / path.relative_to(folder)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, there)
        size += path.stat().st_size
    return size


def by_ckptfs(folder: Path, saves: list[list[Path]], write_path: str, result: Result) -> None:
    """Save, encode, compare; fills `result`."""
    name = f"ckptfs {write_path}"
    with memory_folder() as home:
        config = {
            "settle_s": 3600.0,
            "settle_max_s": 7200.0,
            "write_path": write_path,
            "encode_after_s": "never",
        }
        with Mount(home / "mnt", home / "store", logs=home, config=config, limit_s=LIMIT_S) as mount:
            run = mount.path / "run"
            run.mkdir()
            result.logical = 0
            for paths in saves:
                result.logical += copy_in(folder, paths, run)
                mount.publish("run", timeout_s=LIMIT_S)
            later = {path_key(str(path.relative_to(folder))) for paths in saves for path in paths}
            for key in later:
                path = run / key.replace("#", _LAST_STEP)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(_LATER)
            mount.publish("run", timeout_s=LIMIT_S)
            before = digests(run)
            mount.cli("encode", str(run), timeout_s=LIMIT_S)
            assert digests(run) == before, "every byte is the same"
            mount.stop()
            mount.start()
            assert digests(run) == before, "every byte is the same after a restart"
            usage = mount.facts("du", str(run))
            result.stored[name] = int(str(usage["stored_bytes"])) - len(_LATER)
            result.by_codec = dict(usage["by_codec"])  # type: ignore[call-overload]


def by_borg(folder: Path, saves: list[list[Path]], home: Path) -> int:
    repository = home / "borg"
    environment = {**os.environ, "BORG_BASE_DIR": f"{home}/borg-home"}
    environment["BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK"] = "yes"
    _run(["borg", "init", "--encryption", "none", str(repository)], folder, environment)
    for number, paths in enumerate(saves):
        names = [str(path.relative_to(folder)) for path in paths]
        _run(
            ["borg", "create", "--compression", "zstd,3", f"{repository}::{number}", *names],
            folder,
            environment,
        )
    return size_of(repository)


def by_restic(folder: Path, saves: list[list[Path]], home: Path) -> int:
    repository = home / "restic"
    environment = {**os.environ, "RESTIC_REPOSITORY": str(repository), "RESTIC_PASSWORD": "benchmark"}
    restic = ["restic", "--quiet", "--no-cache"]
    _run([*restic, "init", "--repository-version", "2"], folder, environment)
    for paths in saves:
        _run([*restic, "backup", *(str(path.relative_to(folder)) for path in paths)], folder, environment)
    return size_of(repository)


def by_zipnn(folder: Path, saves: list[list[Path]], python: str) -> int:
    names = "".join(f"{path}\n" for paths in saves for path in paths if path.stat().st_size)
    command = [python, "-c", _ZIPNN]
    done = subprocess.run(command, input=names, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return int(done.stdout.split()[-1])


def size_of(folder: Path) -> int:
    """Bytes of all files of a repository."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    subprocess.run(
        command, cwd=folder, env=environment, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL
    )


def measured(folder: Path, write_paths: list[str], zipnn: str | None, only: str) -> list[Result]:
    """All series whose names have `only` in them, by everybody who is there."""
    peers: dict[str, Callable[[list[list[Path]], Path], int]] = {}
    if shutil.which("borg"):
        peers["borg zstd,3"] = lambda saves, home: by_borg(folder, saves, home)
    if shutil.which("restic"):
        peers["restic"] = lambda saves, home: by_restic(folder, saves, home)
    if zipnn is not None:
        peers["ZipNN"] = lambda saves, home: by_zipnn(folder, saves, zipnn)
    results = []
    for name, goal, globs in SERIES:
        if only not in name:
            continue
        saves = list(saves_of(folder, globs))
        result = Result(name, goal)
        for write_path in write_paths:
            by_ckptfs(folder, saves, write_path, result)
        with memory_folder() as home:
            result.stored |= {peer: store(saves, home) for peer, store in peers.items()}
        results.append(result)
        print(json.dumps(asdict(result)), flush=True)
    return results


def show(results: list[Result]) -> None:
    """The table."""
    who = list(dict.fromkeys(name for result in results for name in result.stored))
    table = Table("logical / stored", "MB", "goal", *who, "")
    for result in results:
        ratios = [result.ratio(name) for name in who]
        own = [ratio for name, ratio in zip(who, ratios, strict=True) if name.startswith("ckptfs") and ratio]
        goal = "" if result.goal is None else f"≥ {result.goal:g}"
        verdict = "" if result.goal is None else "met" if min(own) >= result.goal else "MISSED"
        shown = [f"{ratio:.3f}" if ratio else "" for ratio in ratios]
        table.add_row(result.name, f"{result.logical / 1e6:.0f}", goal, *shown, verdict)
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write-path", choices=["auto", "plain", "both"], default="both")
    parser.add_argument("--zipnn", help="a Python that has zipnn")
    parser.add_argument("--only", default="", help="those series that have this in their names")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    write_paths = ["auto", "plain"] if asked.write_path == "both" else [asked.write_path]
    results = measured(asked.folder, write_paths, asked.zipnn, asked.only)
    show(results)
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
