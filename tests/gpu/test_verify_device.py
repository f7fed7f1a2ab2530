"""`ckptfs verify --device cuda:0` on a mount, by unmodified PyCUDA over the driver that the tests make."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from asking import DAEMON
from fake_driver import build_driver, pycuda_module
from mounting import Mount

NEEDS_PYCUDA = pytest.mark.skipif(pycuda_module() is None, reason="no PyCUDA; `./dev test` installs it")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory, kernels: Path, emulator: Path) -> Path:
    """A folder with a libcuda.so.1."""
    module = pycuda_module()
    assert module is not None
    return build_driver(tmp_path_factory.mktemp("driver"), module, kernels.parent / "kernels.o", emulator)


@NEEDS_PYCUDA
def test_a_version_is_loaded_into_a_device_and_hashed_there(
    mount_factory: Callable[..., Mount], driver: Path
) -> None:
    mount = mount_factory(on_tmpfs=True)
    run = mount.path / "run"
    run.mkdir()
    tensors = {"a": torch.randn(300, 511), "b": torch.randn(90_000), "c": torch.randn(9)}
    safetensors.torch.save_file(tensors, run / "m.safetensors")
    torch.save({"d": torch.randn(100, 700)}, run / "d.pt")
    mount.publish("run")

    def verified(device: str) -> tuple[int, Mapping[str, Any]]:
        done = subprocess.run(
            [*DAEMON, "verify", str(run), "--device", device, "--json"],
            check=False,
            capture_output=True,
            text=True,
            timeout=200,
            env={**mount.environment, "LD_LIBRARY_PATH": str(driver)},
        )
        # PyCUDA's warnings about what was not given back would be here too.
        assert done.stderr == "", done.stderr
        found: Mapping[str, Any] = json.loads(done.stdout)
        return done.returncode, found

    def same(answer: Mapping[str, Any]) -> Mapping[str, Any]:
        return {key: answer[key] for key in answer if key not in ("device", "elapsed_s")}

    code, on_device = verified("cuda:0")
    assert code == 0 and on_device["device"] == "cuda:0" and on_device["tensors"] == 4
    assert same(on_device) == same(verified("cpu")[1])

    content = tensors["b"].numpy().tobytes()
    segment = next(one for one in mount.store.glob("segments/*/*.seg") if content in one.read_bytes())
    with segment.open("r+b") as file:
        file.seek(segment.read_bytes().index(content) + 262_144)
        os.pwrite(file.fileno(), bytes([content[262_144] ^ 128]), file.tell())
    code, on_device = verified("cuda:0")
    (bad,) = on_device["corrupt"]
    assert code == 1 and (bad["tensor"], bad["offset"]) == ("b", 262_144)
    assert same(on_device) == same(verified("cpu")[1])
