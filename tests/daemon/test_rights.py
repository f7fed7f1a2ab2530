"""The rights rule against the kernel's own answer."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.daemon.rights import Access, Caller, Modes, grants, may

USERS = (0, 40001, 40002)
GROUPS = (40101, 40102)
ASK = """
import json, os, sys
uid, gids, names = json.load(sys.stdin)
os.setgroups(gids)
os.setresgid(gids[0], gids[0], gids[0])
os.setresuid(uid, uid, uid)
asked = {"4": os.R_OK, "2": os.W_OK, "1": os.X_OK}
print(json.dumps([[k for k, flag in asked.items() if os.access(name, flag)] for name in names]))
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody can reach; pytest's own is only its user's."""
    folder = Path(tempfile.mkdtemp(prefix="ckptfs-rights-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def chains(rng: random.Random, folder: Path, count: int) -> Iterator[tuple[Path, list[Modes]]]:
    """Random chains of three directories, some with a file at the end, and their modes."""
    for number in range(count):
        path = folder / str(number)
        made: list[Path] = []
        for depth in range(3):
            path = path / "d" if depth else path
            path.mkdir()
            made.append(path)
        if rng.random() < 0.5:
            path = path / "f"
            path.touch()
            made.append(path)
        way = []
        for one in made:
            mode = rng.choice([rng.randrange(0o1000), 0o755, 0o711, 0o750, 0o700])
            os.chown(one, rng.choice(USERS), rng.choice(GROUPS))
            os.chmod(one, mode)
            found = os.stat(one)
            way.append(Modes(found.st_mode, found.st_uid, found.st_gid))
        yield path, way


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: asks the kernel as other users")
def test_the_rule_is_the_kernels(open_folder: Path, rng: random.Random) -> None:
    import json

    base = os.stat(open_folder)
    top = Modes(base.st_mode, base.st_uid, base.st_gid)
    cases = list(chains(rng, open_folder, 120))
    names = [str(path) for path, _ in cases]
    for uid in USERS:
        gids = rng.sample(GROUPS, rng.randrange(1, 3))
        caller = Caller(uid, frozenset(gids))
        said = subprocess.run(
            [sys.executable, "-I", "-c", ASK],
            input=json.dumps([uid, gids, names]),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        for (path, way), granted in zip(cases, json.loads(said.stdout), strict=True):
            for access in Access:
                ours = may(caller, [top, *way], access)
                assert ours == (str(access.value) in granted), (path, way, caller, access)


def test_the_first_class_decides() -> None:
    owner_shut_out = Modes(0o40077, 7, 8)
    assert not grants(Caller(7, frozenset({8})), owner_shut_out, Access.READ)
    assert grants(Caller(9, frozenset({8})), owner_shut_out, Access.READ)


def test_several_rights_at_once() -> None:
    step = Modes(0o40750, 7, 8)
    assert grants(Caller(7, frozenset()), step, Access.READ | Access.WRITE | Access.SEARCH)
    assert not grants(Caller(9, frozenset({8})), step, Access.READ | Access.WRITE)
