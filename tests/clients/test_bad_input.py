"""Files that lie about themselves, written through a real mount: kept as they are, and never believed.

The one rule: whatever the bytes, a version is published soon, gives them back, says in one line what is wrong
with them, and nothing that stands in them is carried out.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import kernelmounts
import pytest
from clients import hostile_files
from clients.hostile_files import Unit
from kernelmounts import poll
from mounting import Mount

PUBLISHED_S = 120.0
Units = dict[str, Unit]
Note = Callable[[str, object], None]

FAMILIES: dict[str, Callable[[], Units]] = {
    "safetensors": hostile_files.safetensors_units,
    "json": hostile_files.json_units,
    "zip": hostile_files.zip_units,
    "gguf": hostile_files.gguf_units,
    "dcp": hostile_files.dcp_units,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_damaged_files_are_kept_and_never_called_complete(
    quick_mount: Mount, family: str, figure: Note
) -> None:
    damaged = FAMILIES[family]()
    kept_and_published(quick_mount, damaged, figure)
    complete = {name for name in damaged if os.path.lexists(quick_mount.history(name) / "latest-complete")}
    assert complete == set()
    for name in sorted(damaged)[:3]:
        [version, *_] = quick_mount.versions(name)
        assert version.state in ("partial", "opaque"), (name, version)
        # JSON within the field is one line for people.
        assert version.state == "opaque" or (version.missing and "\\n" not in version.missing), (
            name,
            version,
        )


def test_large_pickles_cost_no_more_than_their_bytes(quick_mount: Mount, figure: Note) -> None:
    before_bytes = quick_mount.rss_anon_bytes()
    kept_and_published(quick_mount, hostile_files.large_pickle_units(), figure)
    grown_bytes = quick_mount.rss_anon_bytes() - before_bytes
    figure("daemon grew by MiB", grown_bytes >> 20)
    assert grown_bytes < 300 << 20


def test_no_pickle_is_ever_run(quick_mount: Mount, tmp_path: Path, figure: Note) -> None:
    marker = tmp_path / "made-by-a-pickle"
    for kind, pickled in hostile_files.running_pickles(marker).items():
        assert runs(pickled, marker), f"{kind} would prove nothing: pickle does not run it either"
    kept_and_published(quick_mount, hostile_files.pickle_units(marker), figure)
    for name in ("zip-reduce", "legacy-global", "dcp-inst"):
        quick_mount.cli("log", str(quick_mount.path / name))
        assert quick_mount.verified(name)
    quick_mount.stop()
    assert not marker.exists()
    quick_mount.start()
    assert (quick_mount.path / "zip-reduce" / "model.pt").stat().st_size
    assert not marker.exists()


def test_places_that_cannot_be_used_are_refused_in_one_line(quick_mount: Mount, tmp_path: Path) -> None:
    """What `mount` says of them; nothing that lies there is changed, nothing is made."""
    point, full, foreign = (tmp_path / name for name in ("point", "full", "foreign"))
    for folder in (point, full, foreign):
        folder.mkdir()
    (full / "theirs").write_bytes(b"theirs")
    cases = [
        (point, quick_mount.store, "in use by process"),
        (quick_mount.path, tmp_path / "new", "mounted already"),
        (full, tmp_path / "new", "not empty"),
        (full / "theirs", tmp_path / "new", "not a directory"),
        (point, full, "no store"),
    ]
    with dead_foreign_mount(foreign):
        cases.append((foreign, tmp_path / "new", "umount -l"))
        for mountpoint, store, expected in cases:
            said = quick_mount.cli("mount", str(mountpoint), "--store", str(store), check=False, timeout_s=20)
            assert said.returncode == 1 and said.stdout == "", said
            assert said.stderr.startswith("ckptfs: ") and said.stderr.count("\n") == 1, said
            assert expected in said.stderr, said
        assert kernelmounts.find(foreign) is not None
    assert os.listdir(full) == ["theirs"] and (full / "theirs").read_bytes() == b"theirs"
    assert not (tmp_path / "new").exists()
    assert quick_mount.is_alive()


@contextmanager
def dead_foreign_mount(path: Path) -> Iterator[None]:
    """A FUSE mount that is not ours and whose daemon is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    made = libc.mount(b"somebody", os.fsencode(path), b"fuse.other", 0, options)
    os.close(device)
    assert made == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        kernelmounts.remove(path)


def runs(pickled: bytes, marker: Path) -> bool:
    """Whether pickle itself makes the marker out of these bytes; the marker is gone again afterwards."""
    pickle.loads(pickled)
    made = marker.exists()
    marker.unlink(missing_ok=True)
    return made


def kept_and_published(mount: Mount, units: Units, figure: Note) -> None:
    """Write them, and see them published within PUBLISHED_S, byte for byte, by a daemon that lives on."""
    with longest_answer(mount) as waits:
        write(mount, units)
        started = time.monotonic()
        waiting = set(units)

        def all_published() -> bool:
            waiting.difference_update(name for name in list(waiting) if in_history(mount, name, units[name]))
            return not waiting

        assert poll(all_published, PUBLISHED_S, every_s=0.1), f"no version of {waiting}\n{mount.log_tail()}"
        figure("published after s", round(time.monotonic() - started, 1))
    figure("longest wait of another job s", round(max(waits), 1))
    for name, files in units.items():
        for path, content in files.items():
            assert (mount.path / name / path).read_bytes() == content, (name, path)
    mount.wait_until_ingested()
    name = next(iter(units))
    assert mount.verified(name)
    for path in units[name]:
        (mount.path / name / path).unlink()
    assert in_history(mount, name, units[name])
    assert mount.is_alive()
    assert "Traceback" not in mount.log_tail(lines=100_000)


def write(mount: Mount, units: Units) -> None:
    for name, files in units.items():
        for path, content in files.items():
            (mount.path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (mount.path / name / path).write_bytes(content)


def in_history(mount: Mount, name: str, files: Unit) -> bool:
    """Whether the newest version of a unit holds exactly these bytes."""
    versions = mount.version_names(name)
    if not versions:
        return False
    version = mount.history(name) / versions[-1]
    try:
        return all((version / path).read_bytes() == content for path, content in files.items())
    except FileNotFoundError:
        return False


@contextmanager
def longest_answer(mount: Mount) -> Iterator[list[float]]:
    """How long another job waits for a small call on the mount, in s, again and again meanwhile."""
    waits = [0.0]
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.02):
            started = time.monotonic()
            os.statvfs(mount.path)
            waits.append(time.monotonic() - started)

    other = threading.Thread(target=ask)
    other.start()
    try:
        yield waits
    finally:
        over.set()
        other.join(60)
