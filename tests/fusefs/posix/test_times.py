"""utimensat(2), and which call moves which time. Ingest moves none."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from posixplaces import OTHER_USER, USER, Place, opened, outcome

LONG_AGO_NS = 10**9
# One period of the clock by which the kernel stamps what is below the mount (HZ=100), and some more.
TICK_S = 0.012
Change = Callable[[Path], object]


def moved(path: Path, change: Change) -> str:
    """Which of mtime and ctime the change moved, as "m", "c", "mc" or ""."""
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS), follow_symlinks=False)
    before = os.lstat(path)
    time.sleep(TICK_S)
    change(path)
    after = os.lstat(path)
    which = "m" if after.st_mtime_ns != before.st_mtime_ns else ""
    return which + ("c" if after.st_ctime_ns != before.st_ctime_ns else "")


def written(flags: int, payload: bytes = b"x") -> Change:
    def write(path: Path) -> None:
        with opened(path, flags) as fd:
            if payload:
                os.write(fd, payload)

    return write


def read(path: Path) -> bytes:
    return path.read_bytes()


CHANGES: dict[str, tuple[Change, str]] = {
    "read": (read, ""),
    "open for writing": (written(os.O_RDWR, b""), ""),
    "write": (written(os.O_WRONLY), "mc"),
    "append": (written(os.O_WRONLY | os.O_APPEND), "mc"),
    "truncating open": (written(os.O_WRONLY | os.O_TRUNC, b""), "mc"),
    "truncate": (lambda p: os.truncate(p, 3), "mc"),
    "longer": (lambda p: os.truncate(p, 300), "mc"),
    "chmod": (lambda p: os.chmod(p, 0o600), "c"),
    "chown": (lambda p: os.chown(p, 5, 5), "c"),
    "chown to the same": (lambda p: os.chown(p, 0, 0), "c"),
    "link": (lambda p: os.link(p, f"{p}-link"), "c"),
    "rename": (lambda p: (os.rename(p, f"{p}-x"), os.rename(f"{p}-x", p)), "c"),
    "setxattr": (lambda p: os.setxattr(p, "user.a", b"1"), "c"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_moves_what(place: Place, age: str, change: str) -> None:
    path = place.aged(age, b"content")
    call, expected = CHANGES[change]
    assert moved(path, call) == expected


def test_setting_and_reading_back(place: Place, age: str) -> None:
    path = place.aged(age, b"content")
    for atime_ns, mtime_ns in ((1, 2), (10**18 + 123_456_789, 10**18 + 987_654_321), (0, 0)):
        os.utime(path, ns=(atime_ns, mtime_ns))
        assert (path.stat().st_atime_ns, path.stat().st_mtime_ns) == (atime_ns, mtime_ns)
    with opened(path, os.O_RDWR) as fd:
        os.utime(fd, ns=(5, 6))
    assert path.stat().st_mtime_ns == 6


def test_a_set_time_survives_the_store(place: Place) -> None:
    path = place.file(content=b"content")
    os.utime(path, ns=(10**18 + 1, 10**18 + 2))
    place.let_store(path)
    assert (path.stat().st_atime_ns, path.stat().st_mtime_ns) == (10**18 + 1, 10**18 + 2)


def test_a_set_time_survives_the_close_of_a_writer(place: Place) -> None:
    path = place.path / "f"
    with opened(path, os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"content")
        os.utime(path, ns=(5, 6))
    assert path.stat().st_mtime_ns == 6


@pytest.mark.parametrize("size", [100, 300_000])
def test_ingest_moves_no_time(place: Place, size: int) -> None:
    path = place.file(content=os.urandom(size))
    before = path.stat()
    place.let_store(path)
    time.sleep(0.05)
    after = path.stat()
    assert after.st_mtime_ns == before.st_mtime_ns
    assert after.st_ctime_ns == before.st_ctime_ns
    assert after.st_ino == before.st_ino


def test_ingest_of_a_duplicate_moves_no_time(place: Place) -> None:
    content = os.urandom(600_000)
    place.let_store(place.file("first", content))
    path = place.file("second", content)
    before = path.stat()
    place.let_store(path)
    assert (path.stat().st_mtime_ns, path.stat().st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)


def test_now(place: Place) -> None:
    path = place.file()
    os.utime(path, ns=(1, 1))
    before_s = time.time()
    os.utime(path)
    assert before_s - 0.05 <= path.stat().st_mtime <= time.time()
    assert before_s - 0.05 <= path.stat().st_atime <= time.time()


def test_who_may(place: Place) -> None:
    path = place.file(mode=0o666)
    os.chown(path, USER, 0)
    assert place.as_user(lambda: outcome(os.utime, "file", (1, 1))) == "ok"
    assert place.as_user(lambda: outcome(os.utime, "file", (1, 1)), uid=OTHER_USER) == "EPERM"
    assert place.as_user(lambda: outcome(os.utime, "file"), uid=OTHER_USER) == "ok"
    path.chmod(0o644)
    assert place.as_user(lambda: outcome(os.utime, "file"), uid=OTHER_USER) == "EACCES"


def test_links_have_times_of_their_own(place: Place) -> None:
    path = place.file()
    os.symlink("file", place.path / "s")
    os.utime(place.path / "s", ns=(3, 4), follow_symlinks=False)
    assert os.lstat(place.path / "s").st_mtime_ns == 4
    assert path.stat().st_mtime_ns > 10**15


def test_times_never_go_back(place: Place) -> None:
    path = place.file()
    seen = [path.stat().st_mtime_ns]
    for number in range(100):
        if number % 3 == 0:
            path.write_bytes(b"x" * number)
        else:
            written(os.O_WRONLY | os.O_APPEND)(path)
        seen.append(path.stat().st_mtime_ns)
    assert seen == sorted(seen)
    assert len(set(seen)) == len(seen)


def test_a_new_file_is_not_older_than_the_one_before(place: Place) -> None:
    times = []
    for number in range(50):
        path = place.file(f"f{number}", b"x")
        times.append(path.stat().st_mtime_ns)
    assert times == sorted(times)


@pytest.mark.parametrize("seconds", [-(2**63), -(2**40), -(2**31), 2**34, 2**40, 2**63 - 1])
def test_a_time_out_of_range_becomes_the_nearest(place: Place, age: str, seconds: int) -> None:
    path = place.file()
    if age == "stored":
        place.let_store(path)
    assert outcome(os.utime, path, (seconds, seconds)) == "ok"
    kept = path.stat().st_mtime
    assert kept < 0 if seconds < 0 else kept > 2**33
    path.unlink()
