"""The script for machines with a GPU, tried over the fake driver: every stage but torch's runs to its end."""

from __future__ import annotations

import json
import os
import re
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
    done = run_script(tmp_path, driver, SANITIZER, "torch", "verify")
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in (tmp_path / "out" / "on_device.jsonl").read_text().splitlines()]
    stages = [result["stage"] for result in results]
    assert stages == ["vectors", "rates", "memcheck", "racecheck", "processor", "synccheck", "plain_adds"]
    by_stage = dict(zip(stages, results, strict=True))
    assert by_stage["vectors"]["vectors"] > 90 and by_stage["vectors"]["flipped_bits_found"] > 30
    assert by_stage["racecheck"]["said"] == "ERROR SUMMARY: 0 errors"
    assert {"blake3_GBps", "crc64_GBps", "call_GBps"} <= set(by_stage["rates"]["rows"][0])


@NEEDS_PYCUDA
def test_a_stage_that_fails(driver: Path, tmp_path: Path) -> None:
    failing = "echo 'ERROR SUMMARY: 1 error'; exit 9"
    without = ("torch", "verify", "rates", "processor", "plain_adds", "vectors", "synccheck")
    done = run_script(tmp_path, driver, failing, *without)
    assert done.returncode == 1
    assert "-- failed: memcheck racecheck\n" in done.stdout
    assert "ERROR SUMMARY: 1 error" in done.stdout


def test_the_stage_that_verifies_a_model_on_the_cpu() -> None:
    command = [sys.executable, str(SCRIPT.with_name("verify_on_device.py")), "cpu", "--small"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["stage"] == "verify" and found["bad"] == [] and found["bytes"] > 30_000_000


def test_the_stages_are_those_that_the_script_names() -> None:
    text = SCRIPT.read_text()
    named = text.partition("limit of its own: ")[2].partition(".")[0].replace("#", " ").split()
    assert re.findall(r"^stage (\w+) \d+ ", text, re.MULTILINE) == named
    seconds = dict(re.findall(r"(\w+_SECONDS)=(\d+)", text))
    assert int(seconds["MOST_SECONDS"]) < 600
    # What there is not time for behind a PyCUDA that is built for minutes comes last.
    limits = [int(limit) for limit in re.findall(r"^stage \w+ (\d+) ", text, re.MULTILINE)]
    assert (
        sum(limits) <= int(seconds["MOST_SECONDS"])
        and int(seconds["PACKAGES_SECONDS"]) + sum(limits[:4]) < 600
    )
