"""What other users see and may do: on live files, in `.versions`, and through the control socket.

The one rule: every question is asked by a process of that user, about a mount that everybody can reach, and
the kernel's own answer for the same modes on the host is what is expected of live and saved files.

Source: ARCHITECTURE.md §4 "Browse" and §8: an old entry has its saved mode and the rights on the way to it
today; whoever may read a path may log, du and verify it, whoever may write it may publish and tag it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mounting import Mount
from posixplaces import Place, outcome

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: asks as other users")

NOBODY, OWNER, STRANGER = 65534, 61001, 61003
GROUP = 61002
SETTLE_S = 0.3
FILE_MODES = (0o644, 0o640, 0o600, 0o604, 0o444, 0o400, 0o060, 0o006, 0o000, 0o666, 0o755, 0o711)
DIRECTORY_MODES = (0o755, 0o750, 0o711, 0o700, 0o744, 0o733, 0o705, 0o077, 0o000, 0o1777)
Callers = dict[str, tuple[int, int]]
# The owner, one of the group, and two who are neither.
CALLERS: Callers = {
    "owner": (OWNER, GROUP),
    "group": (STRANGER, GROUP),
    "nobody": (NOBODY, NOBODY),
    "stranger": (STRANGER, STRANGER),
}

# The Python of a developer may lie where other users cannot read it, so it is loaded before root is given up.
COMMAND_AS = """
import contextlib, io, os, sys
import email.mime.text, fractions, ipaddress, rich.console, rich.progress, rich.table
from ckptfs.daemon import cli, cli_output, cli_source, control_client, messages
from ckptfs.store import proof_check
with contextlib.redirect_stderr(io.StringIO()):
    cli.run(["log", "/"])
uid, gid = map(int, sys.argv[1:3])
os.setgroups([])
os.setresgid(gid, gid, gid)
os.setresuid(uid, uid, uid)
os.chdir("/")
cli.main(sys.argv[3:])
"""


@pytest.fixture(scope="module")
def mount() -> Iterator[Mount]:
    """A mount below /tmp that every user can reach, with nothing in it but what the tests make."""
    folder = Path(tempfile.mkdtemp(prefix="ckptfs-users-", dir="/tmp"))
    folder.chmod(0o755)
    config = {"settle_s": SETTLE_S, "units": ["/*", "/projects/*/*"]}
    try:
        # It lives as long as all of the tests, on a busy machine as well.
        with Mount(
            folder / "mnt", folder / "store", logs=folder / "logs", config=config, limit_s=1800
        ) as mount:
            mount.path.chmod(0o755)
            yield mount
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def place(mount: Mount, request: pytest.FixtureRequest) -> Place:
    """A fresh unit of OWNER's, mode 0755."""
    assert mount.is_alive(), mount.log_tail()
    path = mount.path / request.node.name.partition("[")[0]
    make_directory(path, 0o755)
    return Place(path, is_mount=True)


def make_directory(path: Path, mode: int) -> Path:
    path.mkdir()
    return owned(path, mode)


def make_file(path: Path, mode: int, content: bytes = b"content") -> Path:
    path.write_bytes(content)
    return owned(path, mode)


def owned(path: Path, mode: int) -> Path:
    """Give it to OWNER and GROUP with exactly this mode."""
    os.chown(path, OWNER, GROUP)
    path.chmod(mode)
    return path


def fill(root: Path) -> None:
    """A file of every mode, and a directory of every mode with a file in it that everybody may read."""
    for mode in FILE_MODES:
        make_file(root / f"f{mode:04o}", mode)
    for mode in DIRECTORY_MODES:
        make_file(make_directory(root / f"d{mode:04o}", 0o755) / "inside", 0o644)
        (root / f"d{mode:04o}").chmod(mode)


def reading(root: str) -> dict[str, str]:
    """What each call that only looks says of what `fill` made."""
    said = {}
    for mode in FILE_MODES:
        path = f"{root}/f{mode:04o}"
        said[f"{path[len(root) :]} read"] = outcome(read, path)
        said[f"{path[len(root) :]} exec"] = str(os.access(path, os.X_OK))
        said[f"{path[len(root) :]} stat"] = mode_and_owner(path)
    for mode in DIRECTORY_MODES:
        path = f"{root}/d{mode:04o}"
        said[f"{path[len(root) :]} list"] = outcome(os.listdir, path)
        said[f"{path[len(root) :]} enter"] = outcome(read, f"{path}/inside")
        said[f"{path[len(root) :]} stat"] = mode_and_owner(path)
    return said


def writing(root: str) -> dict[str, str]:
    """What each call that changes something says; what it made, it takes away."""
    said = {}
    for mode in FILE_MODES:
        path = f"{root}/f{mode:04o}"
        said[f"f{mode:04o} append"] = outcome(os.open, path, os.O_WRONLY | os.O_APPEND)
        said[f"f{mode:04o} truncate"] = outcome(os.truncate, path, 7)
        said[f"f{mode:04o} remove"] = outcome(os.rename, path, f"{path}.away")
        if os.path.exists(f"{path}.away"):
            os.rename(f"{path}.away", path)
    for mode in DIRECTORY_MODES:
        path = f"{root}/d{mode:04o}"
        said[f"d{mode:04o} make"] = outcome(os.mkdir, f"{path}/made")
        said[f"d{mode:04o} unmake"] = outcome(os.rmdir, f"{path}/made")
        said[f"d{mode:04o} move"] = outcome(os.rename, f"{path}/inside", f"{path}/inside")
    return said


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def mode_and_owner(path: str) -> str:
    found = os.lstat(path)
    return f"{found.st_mode:o} {found.st_uid} {found.st_gid}"


def by_each(place: Place, ask: Callable[[], dict[str, str]]) -> dict[str, dict[str, str]]:
    return {who: place.as_user(ask, uid=uid, gid=gid) for who, (uid, gid) in CALLERS.items()}


@pytest.fixture
def host(tmp_path: Path) -> Place:
    """The same on the host's own file system."""
    fill(make_directory(tmp_path / "host", 0o755))
    return Place(tmp_path / "host", is_mount=False)


def test_live_files(place: Place, host: Place) -> None:
    fill(place.path)
    for ask in (reading, writing):
        assert by_each(place, lambda ask=ask: ask(".")) == by_each(host, lambda ask=ask: ask("."))  # type: ignore[misc]


def test_saved_files_have_their_saved_modes(mount: Mount, place: Place, host: Place) -> None:
    """The modes of the live files count for nothing: after the save all are opened, then all closed."""
    fill(place.path)
    os.mkdir(place.path / ".versions" / "saved")
    expected = by_each(host, lambda: reading("."))
    for today in (0o777, 0o000):
        for name in os.listdir(place.path):
            if (place.path / name).is_file():  # a directory that is closed today closes the way
                (place.path / name).chmod(today)
        by_unit = f"../.versions/{place.path.name}/saved"
        for way in (".versions/saved", by_unit):
            assert by_each(place, lambda way=way: reading(way)) == expected, way  # type: ignore[misc]


def test_nothing_saved_can_be_changed_by_anybody(place: Place) -> None:
    make_file(place.path / "x", 0o666)
    os.mkdir(place.path / ".versions" / "saved")

    def ask() -> dict[str, str]:
        saved = ".versions/saved/x"
        return {
            "write": outcome(os.open, saved, os.O_WRONLY),
            "unlink": outcome(os.unlink, saved),
            "chmod": outcome(os.chmod, saved, 0o777),
        }

    for said in by_each(place, ask).values():
        assert set(said.values()) <= {"EROFS", "EACCES", "EPERM"}, said


def test_a_way_that_is_closed_later_hides_history(mount: Mount, place: Place) -> None:
    make_file(make_directory(place.path / "sub", 0o755) / "x", 0o644)
    os.mkdir(place.path / ".versions" / "saved")
    name = place.path.name
    ways = [
        f"{name}/.versions/saved/sub/x",
        f"{name}/sub/.versions/saved/x",
        f".versions/{name}/saved/sub/x",
    ]
    root = Place(mount.path, is_mount=True)

    def ask() -> dict[str, str]:
        return {way: outcome(read, way) for way in ways}

    assert all(set(said.values()) == {"ok"} for said in by_each(root, ask).values())
    place.path.chmod(0o700)
    for who, said in by_each(root, ask).items():
        assert set(said.values()) == {"ok" if who == "owner" else "EACCES"}, who
    place.path.chmod(0o750)
    for who, said in by_each(root, ask).items():
        assert set(said.values()) == {"ok" if who in ("owner", "group") else "EACCES"}, who


def test_a_subdirectory_that_is_closed_later_closes_its_own_versions(place: Place) -> None:
    make_file(make_directory(place.path / "sub", 0o755) / "x", 0o644)
    os.mkdir(place.path / ".versions" / "saved")
    (place.path / "sub").chmod(0o700)
    said = by_each(place, lambda: {"x": outcome(read, "sub/.versions/saved/x")})
    assert {who: one["x"] for who, one in said.items()} == {
        **dict.fromkeys(CALLERS, "EACCES"),
        "owner": "ok",
    }


def test_a_subdirectory_that_is_closed_later_is_closed_in_the_versions_of_its_unit(place: Place) -> None:
    """The control socket refuses the same place (`verify run/sub/x@saved`)."""
    make_file(make_directory(place.path / "sub", 0o755) / "x", 0o644)
    os.mkdir(place.path / ".versions" / "saved")
    (place.path / "sub").chmod(0o700)
    said = by_each(place, lambda: {"x": outcome(read, ".versions/saved/sub/x")})
    assert {one["x"] for who, one in said.items() if who != "owner"} == {"EACCES"}


def test_a_parent_of_a_unit_that_is_closed_later_closes_it_at_the_root_too(mount: Mount) -> None:
    team = make_directory(make_directory(mount.path / "projects", 0o755) / "team", 0o755)
    make_file(make_directory(team / "run", 0o755) / "x", 0o644)
    os.mkdir(team / "run" / ".versions" / "saved")
    ways = ["projects/team/run/.versions/saved/x", ".versions/projects%2Fteam%2Frun/saved/x"]
    root = Place(mount.path, is_mount=True)

    def ask() -> dict[str, str]:
        return {way: outcome(read, way) for way in ways}

    assert all(set(said.values()) == {"ok"} for said in by_each(root, ask).values())
    team.chmod(0o700)
    for who, said in by_each(root, ask).items():
        assert set(said.values()) == {"ok" if who == "owner" else "EACCES"}, (who, said)


def test_removed_units_are_the_saved_owners_and_roots(mount: Mount, place: Place) -> None:
    make_file(place.path / "x", 0o666)
    os.mkdir(place.path / ".versions" / "saved")
    name = place.path.name
    shutil.rmtree(place.path)
    root = Place(mount.path, is_mount=True)
    way = f".versions/{name}"

    def ask() -> dict[str, str]:
        return {"list": outcome(os.listdir, way), "read": outcome(read, f"{way}/saved/x")}

    for who, said in by_each(root, ask).items():
        assert set(said.values()) == {"ok" if who == "owner" else "EACCES"}, (who, said)
    assert (mount.history(name) / "saved" / "x").read_bytes() == b"content"
    answers = told(mount, [(who, "log", str(place.path)) for who in CALLERS])
    assert answers["owner log"] == "ok"
    for who in ("group", "nobody", "stranger"):
        assert answers[f"{who} log"].startswith("ckptfs: "), answers


def test_who_may_make_a_version_by_mkdir(place: Place) -> None:
    make_file(place.path / "x", 0o644)
    place.path.chmod(0o775)
    said = by_each(place, lambda: {"mkdir": outcome(os.mkdir, f".versions/by{os.geteuid()}-{os.getegid()}")})
    assert {who: one["mkdir"] for who, one in said.items()} == {
        "owner": "ok",
        "group": "ok",
        "nobody": "EACCES",
        "stranger": "EACCES",
    }


def told(mount: Mount, questions: list[tuple[str, ...]]) -> dict[str, str]:
    """ "ok", or the one line on stderr, of each `ckptfs COMMAND ARGUMENTS` asked by each caller."""
    with ThreadPoolExecutor(2) as asking:
        answers = list(asking.map(lambda question: ask_as(mount, *question), questions))
    return {f"{who} {command}": said for (who, command, *_), said in zip(questions, answers, strict=True)}


def ask_as(mount: Mount, who: str, *arguments: str) -> str:
    done = command_as(mount, who, *arguments)
    if done.returncode == 0:
        assert done.stderr == "", done
        return "ok"
    assert done.returncode == 1, done
    assert done.stdout == "" and done.stderr.count("\n") == 1, done
    return done.stderr


def command_as(mount: Mount, who: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`ckptfs ARGUMENTS` by that caller, who has no home and no place of its own."""
    uid, gid = CALLERS[who]
    return subprocess.run(
        [sys.executable, "-c", COMMAND_AS, str(uid), str(gid), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=60,
        env={**mount.environment, "HOME": "/nonexistent", "XDG_CONFIG_HOME": "/nonexistent"},
    )


def test_the_command_line_of_another_user(mount: Mount, place: Place) -> None:
    """Mode 0775: the group may write, others may read. Then 0700: they may not even look."""
    make_file(place.path / "x", 0o644)
    place.path.chmod(0o775)
    mount.publish(place.path.name)
    unit = str(place.path)
    looks = [("log", unit), ("du", unit), ("verify", unit), ("diff", f"{unit}@1", f"{unit}@1")]
    changes = [("publish", unit), ("tag", f"{unit}@1", "named"), ("pin", f"{unit}@1")]
    rest = [("forget", f"{unit}@1"), ("unit", unit)]

    said = told(mount, [("nobody", *one) for one in looks + changes + rest])
    for command in ("log", "du", "verify", "diff"):
        assert said[f"nobody {command}"] == "ok"
    for command in ("publish", "tag", "pin", "forget", "unit"):
        assert said[f"nobody {command}"].startswith("ckptfs: "), said
    said = told(mount, [("group", *one) for one in [*changes, *rest]])
    assert {command: said[f"group {command}"] for command in ("publish", "tag", "pin")} == {
        "publish": "ok",
        "tag": "ok",
        "pin": "ok",
    }
    assert "owner" in said["group forget"] and "owner" in said["group unit"]

    place.path.chmod(0o700)
    said = told(mount, [("nobody", *one) for one in looks])
    assert all(line.startswith("ckptfs: ") for line in said.values()), said
    assert next(version.tags for version in mount.versions(place.path.name)) == ("named",)


def test_a_diff_tells_what_the_saved_modes_let_read(mount: Mount, place: Place) -> None:
    """The modes of today count for the way to the unit only."""
    make_directory(place.path / "closed", 0o755)
    for tag in ("before", "after"):
        for name in ("open", "secret", "closed/inside"):
            (place.path / name).write_text(tag)
            owned(place.path / name, 0o600 if name == "secret" else 0o644)
        (place.path / "closed").chmod(0o700)
        mount.publish(place.path.name, tag=tag)
        (place.path / "closed").chmod(0o755)
    unit = str(place.path)

    def changed(who: str) -> dict[str, object]:
        done = command_as(mount, who, "diff", f"{unit}@before", f"{unit}@after", "--json")
        assert done.returncode == 0, done
        return {one["path"]: one.get("changed_bytes") for one in json.loads(done.stdout)["files"]}

    assert changed("owner") == {"open": 5, "secret": 5, "closed/inside": 5}
    assert changed("nobody") == {"open": 5, "secret": None, "closed": None}


def test_a_proof_is_for_whoever_may_read_the_file(mount: Mount, place: Place) -> None:
    for name, mode in (("open", 0o644), ("secret", 0o600)):
        make_file(place.path / name, mode)
    mount.publish(place.path.name)
    (place.path / "secret").chmod(0o644)  # the saved mode counts, whatever it is today

    def asked(who: str, name: str) -> str:
        done = command_as(mount, who, "prove", f"{place.path}/{name}@1")
        return "ok" if done.returncode == 0 and done.stdout and not done.stderr else done.stderr

    for who in CALLERS:
        assert asked(who, "open") == "ok"
    assert asked("owner", "secret") == "ok"
    for who in ("group", "nobody", "stranger"):
        assert "you may not read" in asked(who, "secret")
    place.path.chmod(0o700)
    assert asked("owner", "open") == "ok" and asked("nobody", "open").startswith("ckptfs: ")


def test_status_tells_nobody_of_closed_units(mount: Mount, place: Place) -> None:
    make_file(place.path / "x", 0o644)
    os.mkdir(place.path / ".versions" / "saved")
    place.path.chmod(0o700)
    done = command_as(mount, "nobody", "status", str(mount.path), "--json")
    assert done.returncode == 0, done
    units = [unit["name"] for unit in json.loads(done.stdout)["units"]]
    assert place.path.name not in units
    assert place.path.name in command_as(mount, "owner", "status", str(mount.path), "--json").stdout
