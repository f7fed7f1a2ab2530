"""What every test may rely on: `mount`, `mount_factory`, `seed`, `rng`.

The one rule: a run that leaves a mount behind fails.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import kernelmounts
import left_open
from mounting import Config, Mount, memory_folder
from seaweed import S3Server, s3_server

import ckptfs.fusefs  # noqa: F401  # before any test imports pyfuse3, or there are no extended replies
from ckptfs.store.index import Index

SEED = int(os.environ.get("CKPTFS_SEED") or random.SystemRandom().randrange(2**32))
os.environ["CKPTFS_SEED"] = str(SEED)  # for the processes that share the tests among them
MOUNTS = pytest.StashKey[list[Mount]]()
TEMPORARY = pytest.StashKey[Path]()
BEFORE = pytest.StashKey[set[Index]]()
LEFT = pytest.StashKey[list[str]]()
_LEFT = "left mounts"
MountFactory = Callable[..., Mount]


left_open.watch()


def pytest_report_header() -> str:
    return f"ckptfs: CKPTFS_SEED={SEED}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests measured (the fixture `figure`)."""
    measured = [
        f"{report.nodeid.rpartition('::')[2]}: {name} = {value}"
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, value in report.user_properties
    ]
    if measured:
        terminalreporter.section("measured figures")
        terminalreporter.write("\n".join([*sorted(measured), ""]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    item.stash[BEFORE] = left_open.opened()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """What a test has opened, and neither it nor a fixture of it has closed, is closed behind them."""
    try:
        return (yield)
    finally:
        left_open.close(left_open.opened() - item.stash.get(BEFORE, left_open.opened()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the log of each daemon of a failed test, and the seed it ran with."""
    report = yield
    if report.failed:
        report.sections.append(("ckptfs seed", f"CKPTFS_SEED={SEED}"))
        report.sections += [
            (f"log of the daemon on {mount.path}", mount.log_tail()) for mount in item.stash.get(MOUNTS, [])
        ]
    return report


@pytest.fixture(scope="session", autouse=True)
def _temporary_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    request.config.stash[TEMPORARY] = tmp_path_factory.getbasetemp()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Take away what was left, but fail the run for it."""
    left = [str(entry.path) for entry in _left_mounts(session.config)]
    for path in left:
        kernelmounts.remove(Path(path))
    shared = getattr(session.config, "workeroutput", None)
    if shared is not None:
        shared[_LEFT] = left  # one of several processes: the first tells
    left += session.config.stash.get(LEFT, [])
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        sys.stderr.write(f"\nckptfs: tests left these mounts behind: {', '.join(left)}\n")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One of several processes that ran tests has ended (pytest-xdist)."""
    config: pytest.Config = node.config
    config.stash.setdefault(LEFT, []).extend(getattr(node, "workeroutput", {}).get(_LEFT, []))


def _left_mounts(config: pytest.Config) -> list[kernelmounts.MountEntry]:
    folder = config.stash.get(TEMPORARY, None)
    return kernelmounts.below(folder) if folder is not None else []


@pytest.fixture(scope="session")
def seed() -> int:
    """The run's seed, from CKPTFS_SEED if that is set."""
    return SEED


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers that depend on the run's seed and the test's name only, not on what ran before."""
    return random.Random(f"{SEED}:{request.node.nodeid}")


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """`figure(name, value)` notes a measurement; the run's summary prints all of them."""
    return lambda name, value: request.node.user_properties.append((name, value))


@pytest.fixture
def mount_factory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MountFactory]:
    """Starts mounts, as `mount_factory(on_tmpfs=True)`; see `make`. All are stopped after the test."""
    mounts = request.node.stash.setdefault(MOUNTS, [])
    with contextlib.ExitStack() as stack:

        def make(
            *,
            config: Config | None = None,
            on_tmpfs: bool = False,
            store: Path | None = None,
            limit_s: float = 180.0,
        ) -> Mount:
            """A started mount. The store is below `tmp_path`, or in memory, or where the test says."""
            folder = tmp_path / f"mount{len(mounts)}"
            if store is None:
                store = (stack.enter_context(memory_folder()) if on_tmpfs else folder) / "store"
                stack.callback(shutil.rmtree, store, ignore_errors=True)
            mount = Mount(folder / "mnt", store, logs=folder / "logs", config=config, limit_s=limit_s)
            mounts.append(mount)
            return stack.enter_context(mount)

        yield make


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server, one for all tests that ask for it."""
    with s3_server(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def mount(mount_factory: MountFactory) -> Mount:
    """A mount with the default configuration on a store below `tmp_path`."""
    return mount_factory()
