"""The host code, run for real by unmodified PyCUDA over a driver that the tests make."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_driver import pycuda_module
from host_scenarios import SCENARIOS

HERE = Path(__file__).parent
NEEDS_PYCUDA = pytest.mark.skipif(pycuda_module() is None, reason="no PyCUDA; `./dev test` installs it")


def run_python(arguments: list[str], libraries: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    if libraries is not None:
        environment["LD_LIBRARY_PATH"] = str(libraries)
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(
        command, check=False, env=environment, cwd=HERE, capture_output=True, text=True, timeout=200
    )


@NEEDS_PYCUDA
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_over_the_fake_driver(scenario: str, driver: Path) -> None:
    done = run_python(["host_scenarios.py", scenario], driver)
    # What PyCUDA prints where the driver does not even make a context current any more.
    said = re.sub(r"PyCUDA WARNING: .*\ncuCtxPushCurrent failed: .*\n", "", done.stderr)
    assert (done.returncode, done.stdout, said) == (0, "", "")


_ASK = """
from ckptfs.gpu.device import DeviceHasher
from ckptfs.store.errors import Unsupported
try:
    DeviceHasher()
except Unsupported as error:
    print(error)
"""


@NEEDS_PYCUDA
def test_without_a_driver(tmp_path: Path) -> None:
    """A library that is none is what the linker finds first, also on a machine that has a driver."""
    (tmp_path / "libcuda.so.1").write_text("")
    done = run_python(["-c", _ASK], tmp_path)
    assert done.stderr == ""
    assert done.stdout.startswith("PyCUDA finds no NVIDIA driver (") and done.stdout.count("\n") == 1
    assert "libcuda.so.1: file too short" in done.stdout and "install the driver" in done.stdout


def test_without_pycuda() -> None:
    done = run_python(["-c", "import sys; sys.modules['pycuda'] = None\n" + _ASK])
    assert done.stderr == ""
    assert done.stdout.startswith("hashing on a GPU needs PyCUDA (") and done.stdout.count("\n") == 1
    assert "pip install 'ckptfs[gpu]'" in done.stdout
