"""`place`: every conformance test runs on the host and on each write path of the mount."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from mounting import Mount
from posixplaces import Place

WRITE_PATHS = ["plain", "auto"]
# Short, so that files are ingested while the tests work on them.
SETTLE_S = 0.2
# Two processes share the files: other tests may lie between those of this package.
LIMIT_S = 7200.0
MountOf = Callable[[str], Mount]


@pytest.fixture(scope="package")
def mount_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MountOf]:
    """The package's mount by its write path; the store is on the file system that it is compared with."""
    mounts: dict[str, Mount] = {}
    with contextlib.ExitStack() as stack:

        def get(write_path: str) -> Mount:
            if write_path not in mounts:
                folder = tmp_path_factory.mktemp("posix")
                config = {"settle_s": SETTLE_S, "write_path": write_path}
                mount = Mount(
                    folder / "mnt", folder / "store", logs=folder / "logs", config=config, limit_s=LIMIT_S
                )
                mounts[write_path] = stack.enter_context(mount)
            return mounts[write_path]

        yield get


def fresh_place(mount: Mount, name: str) -> Place:
    assert mount.is_alive(), f"an earlier test ended the daemon:\n{mount.log_tail()}"
    (mount.path / name).mkdir()
    return Place(mount.path / name, is_mount=True)


@pytest.fixture(params=WRITE_PATHS)
def shared_mount(request: pytest.FixtureRequest, mount_of: MountOf) -> Mount:
    """The mount itself, for what only ckptfs does."""
    return mount_of(request.param)


@pytest.fixture
def mounted(shared_mount: Mount, tmp_path: Path) -> Place:
    """A fresh directory on it."""
    return fresh_place(shared_mount, tmp_path.name)


@pytest.fixture(params=["host", *WRITE_PATHS])
def place(request: pytest.FixtureRequest, mount_of: MountOf, tmp_path: Path) -> Place:
    """A fresh directory: on the host in one run of the test, on the mount in the others."""
    if request.param != "host":
        return fresh_place(mount_of(request.param), tmp_path.name)
    (tmp_path / "host").mkdir()
    return Place(tmp_path / "host", is_mount=False)


@pytest.fixture(params=["fresh", "stored"])
def age(request: pytest.FixtureRequest) -> str:
    """Whether a file is still in staging or already in the store when the test goes on."""
    return str(request.param)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On the host there is one age of a file only."""
    kept, twice = [], []
    for item in items:
        parameters = (
            item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        )
        is_twice = parameters.get("place") == "host" and parameters.get("age") == "stored"
        (twice if is_twice else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=twice)
