"""Fixtures of the client tests: a mount in memory that settles quickly, processes that hold a framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from clients.clientproc import Client
from mounting import Mount

SETTLE_S = 0.5
BESIDE = Path(__file__).parents[2] / ".venv" / "alt"
OLD_SAFETENSORS = BESIDE / "safetensors-0.7"
MORE_FRAMEWORKS = BESIDE / "clients"


@pytest.fixture
def quick_mount(request: pytest.FixtureRequest, mount_factory: Callable[..., Mount]) -> Mount:
    """A mount on a store in memory, with `settle_s` short enough for tests of many saves.

    An indirect parameter adds to its configuration.
    """
    return mount_factory(config={"settle_s": SETTLE_S, **getattr(request, "param", {})}, on_tmpfs=True)


@pytest.fixture(scope="session")
def torch_client() -> Iterator[Client]:
    """A process with torch and safetensors (0.8) loaded; it serves all tests of the run."""
    with Client("torch_client.py") as client:
        yield client


@pytest.fixture(scope="session")
def old_safetensors_client() -> Iterator[Client]:
    """The same process with safetensors 0.7, which truncates the good file in place."""
    if not OLD_SAFETENSORS.is_dir():
        pytest.fail(f"safetensors 0.7 is not installed in {OLD_SAFETENSORS}; ./dev test installs it")
    with Client("torch_client.py", environment={"PYTHONPATH": str(OLD_SAFETENSORS)}) as client:
        yield client


@pytest.fixture(scope="session")
def more_frameworks() -> Mapping[str, str]:
    """The environment of a client script that imports what only the heavy client tests need."""
    if not MORE_FRAMEWORKS.is_dir():
        pytest.fail(
            f"Orbax, DeepSpeed and others are not installed in {MORE_FRAMEWORKS}; ./dev test --all does it"
        )
    return {"PYTHONPATH": str(MORE_FRAMEWORKS)}
