"""The script for machines with a GPU, tried over the fake driver: every stage but torch's runs to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from emulated import SOURCES
from test_device import NEEDS_PYCUDA

SCRIPT = Path(__file__).parent / "on_device.sh"

# Programs of a machine with a GPU. The sanitizer runs what it is given; nvcc "compiles" to the shipped file.
PROGRAMS = {
    "python3": f'exec {sys.executable} "$@"',
    "nvidia-smi": 'case "$*" in *compute_cap*) echo 9.0 ;; *) echo "Emulated device, 0" ;; esac',
    "nvcc": f'while [ "$1" != -o ]; do shift; done; cp {SOURCES}/kernels.fatbin "$2"',
}
SANITIZER = 'while [ "$1" != python3 ]; do shift; done; "$@" && echo "ERROR SUMMARY: 0 errors"'


def run_script(
    folder: Path, libraries: Path, sanitizer: str, *without: str
) -> subprocess.CompletedProcess[str]:
    programs = folder / "bin"
    programs.mkdir()
    for name, body in {**PROGRAMS, "compute-sanitizer": sanitizer}.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(libraries),
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
    command = [str(SCRIPT), str(folder / "out"), "--small"]
    command += [word for stage in without for word in ("--without", stage)]
    return subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, timeout=250, cwd=folder
    )


@NEEDS_PYCUDA
def test_every_stage_but_torch(driver: Path, tmp_path: Path) -> None:
    done = run_script(tmp_path, driver, SANITIZER, "torch")
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in (tmp_path / "out" / "on_device.jsonl").read_text().splitlines()]
    stages = [result["stage"] for result in results]
    assert stages == ["vectors", "rates", "memcheck", "racecheck", "synccheck", "processor", "plain_adds"]
    by_stage = dict(zip(stages, results, strict=True))
    assert by_stage["vectors"]["vectors"] > 90 and by_stage["vectors"]["flipped_bits_found"] > 30
    assert by_stage["racecheck"]["said"] == "ERROR SUMMARY: 0 errors"
    assert {"blake3_GBps", "crc64_GBps", "call_GBps"} <= set(by_stage["rates"]["rows"][0])


@NEEDS_PYCUDA
def test_a_stage_that_fails(driver: Path, tmp_path: Path) -> None:
    failing = "echo 'ERROR SUMMARY: 1 error'; exit 9"
    without = ("torch", "rates", "processor", "plain_adds", "vectors", "synccheck")
    done = run_script(tmp_path, driver, failing, *without)
    assert done.returncode == 1
    assert "-- failed: memcheck racecheck\n" in done.stdout
    assert "ERROR SUMMARY: 1 error" in done.stdout
