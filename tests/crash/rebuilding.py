"""A store whose index is gone: rebuild, killed half way and run again; extract without ckptfs.

One rule: how often and when the rebuild is killed is told by the caller's random numbers; that it was
killed at all is checked, not assumed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

EXTRACT = Path(__file__).parents[2] / "store" / "extract.py"
_REBUILD_LIMIT_S = 120.0
_KILLED_WITHIN_S = 0.15
_EXTRACT_LIMIT_S = 120.0


def rebuild_command(store: Path) -> list[str]:
    """The command as a user runs it."""
    return [sys.executable, "-m", "ckptfs.daemon", "rebuild", "--store", str(store)]


def delete_index(store: Path) -> None:
    """What a disk fault, or an impatient hand, does."""
    shutil.rmtree(store / "index")


def rebuild_with_kills(store: Path, environment: Mapping[str, str], chance: random.Random, kills: int) -> int:
    """Rebuild until it is through, after `kills` tries of which each is killed at a random moment of its
    work; how many of them really were killed before their end."""
    killed = 0
    for _ in range(kills):
        process = subprocess.Popen(rebuild_command(store), stderr=subprocess.DEVNULL, env=environment)
        begun = time.monotonic()
        while not (store / "index.new").exists() and process.poll() is None:
            assert time.monotonic() - begun < _REBUILD_LIMIT_S
            time.sleep(0.001)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0, _KILLED_WITHIN_S))
        if process.poll() is None:
            process.kill()
            killed += 1
        process.wait(20)
    done = subprocess.run(
        rebuild_command(store),
        check=False,
        capture_output=True,
        text=True,
        timeout=_REBUILD_LIMIT_S,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return killed


def bare_copy(store: Path, target: Path) -> Path:
    """A copy as FORMAT.md says a backup is made: format, then segments (sparse), then history."""
    target.mkdir()
    for part in ("format", "segments", "history"):
        subprocess.run(
            ["cp", "-a", "--sparse=always", str(store / part), str(target)], check=True, timeout=60
        )
    return target


def extract(store: Path, *arguments: str) -> str:
    """Run store/extract.py by a Python that has no ckptfs, nor any other package."""
    python = _bare_python()
    done = subprocess.run(
        [python, "-I", "-S", str(EXTRACT), str(store), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=_EXTRACT_LIMIT_S,
        env={"PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, f"extract.py {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


def _bare_python() -> str:
    """The interpreter below our virtual environment; -S keeps its own packages out as well."""
    return os.path.join(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
