"""Must show 8: the daemon's memory does not grow with what is written through it or listed from it."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from clients.clientproc import run_script
from clients.recovery import digest_tree, reported
from kernelmounts import poll
from mounting import Mount

MIB = 1024 * 1024
Figure = Callable[[str, object], None]
SOME_TIME = [pytest.mark.heavy, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("write_path", ["auto", "plain"])
@pytest.mark.parametrize(
    ("total_mib", "file_mib"),
    [
        pytest.param(512, 256, id="512MiB"),
        pytest.param(4096, 1024, id="4GiB", marks=SOME_TIME),
    ],
)
def test_gigabytes_pass_through_a_daemon_of_less_than_300_mib(
    mount_factory: Callable[..., Mount], figure: Figure, total_mib: int, file_mib: int, write_path: str
) -> None:
    mount = mount_factory(config={"write_path": write_path}, on_tmpfs=True, limit_s=900)
    run = mount.path / "run"
    arguments = ["--bytes", str(total_mib * MIB), "--file-bytes", str(file_mib * MIB)]
    with peak_of(mount) as peak:
        said = run_script("plain_files.py", str(run), *arguments, timeout_s=600)
        mount.wait_until_ingested(timeout_s=300)
        mount.publish("run")
    figure("peak RssAnon MiB", max(peak) // MIB)
    assert max(peak) < 300 * MIB, f"{max(peak) / MIB:.0f} MiB"
    for save in reported(said):
        assert digest_tree(run / save.path) == save.files


@pytest.mark.parametrize(
    "count", [pytest.param(3_000, id="3k"), pytest.param(100_000, id="100k", marks=SOME_TIME)]
)
def test_a_directory_of_many_files_is_listed_quickly_and_costs_little_memory(
    mount_factory: Callable[..., Mount], figure: Figure, count: int
) -> None:
    """Listed by a daemon that has just started, so that nothing is known from writing the files.

    One version is made, at the end: `settle_max_s` is longer than the writing takes.
    """
    mount = mount_factory(config={"settle_max_s": 3600}, on_tmpfs=True, limit_s=1500)
    folder = mount.path / "many"
    run_script("plain_files.py", str(folder), "--names", str(count), timeout_s=900)
    mount.publish("many", timeout_s=600)
    [version] = mount.version_names("many")
    assert len(list((mount.history("many") / version).iterdir())) == count
    mount.stop()
    mount.restart()

    before = settled_rss(mount)

    names, listing_s = timed(["ls", "-f", str(folder)])
    found, find_s = timed(["find", str(folder), "-type", "f", "-size", "+0c"])
    growth = mount.rss_anon_bytes() - before
    figure("ls -f seconds", round(listing_s, 2))
    figure("find seconds", round(find_s, 2))
    figure("growth MiB", round(growth / MIB, 1))
    assert names >= count and found == count
    assert listing_s < 3, f"ls -f of {count} names took {listing_s:.1f} s"
    assert growth <= 50 * MIB, f"listing {count} files grew the daemon by {growth / MIB:.0f} MiB"

    drop_kernel_caches()
    kept = max(4 * MIB, growth // 4)
    given_back = poll(lambda: mount.rss_anon_bytes() - before <= kept, 20, every_s=0.5)
    figure("kept MiB", round((mount.rss_anon_bytes() - before) / MIB, 1))
    assert given_back, f"still {(mount.rss_anon_bytes() - before) / MIB:.0f} MiB more than before find"


def settled_rss(mount: Mount) -> int:
    """The daemon's anonymous memory once it has looked through its history, as it does after a start."""
    seen = [mount.rss_anon_bytes()]

    def stands_still() -> bool:
        seen.append(mount.rss_anon_bytes())
        return len(seen) > 10 and max(seen[-8:]) - min(seen[-8:]) < MIB // 4

    assert poll(stands_still, 60, every_s=0.5), f"memory never settled: {seen[-20:]}"
    return seen[-1]


def timed(command: list[str]) -> tuple[int, float]:
    """How many lines a command prints, and the seconds it takes."""
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    return done.stdout.count(b"\n"), time.monotonic() - begin


def drop_kernel_caches() -> None:
    """Dentries and inodes of all file systems; pages stay."""
    Path("/proc/sys/vm/drop_caches").write_text("2")


@contextmanager
def peak_of(mount: Mount) -> Iterator[list[int]]:
    """Sample the daemon's anonymous memory until the block ends; the list fills as it goes."""
    samples, done = [mount.rss_anon_bytes()], threading.Event()

    def sample() -> None:
        while not done.wait(0.05):
            samples.append(mount.rss_anon_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield samples
    finally:
        done.set()
        sampler.join()
