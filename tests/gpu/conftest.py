"""What the tests of the device share: the kernels compiled for the CPU, and a driver that runs them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from emulated import build_emulator, build_kernels
from fake_driver import build_driver, pycuda_module


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The object that runs kernels; they are linked to it."""
    return build_emulator(tmp_path_factory.mktemp("emulator"))


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory, emulator: Path) -> Path:
    """The shared library of the shipped kernels."""
    return build_kernels(tmp_path_factory.mktemp("kernels"), emulator)


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory, kernels: Path, emulator: Path) -> Path:
    """A folder with a libcuda.so.1 that runs the shipped kernels, for the PyCUDA that is installed."""
    module = pycuda_module()
    assert module is not None, "asked for only where PyCUDA is"
    return build_driver(tmp_path_factory.mktemp("driver"), module, kernels.parent / "kernels.o", emulator)
