"""Makes the fatbin from its source: `python -m ckptfs.gpu.build_fatbin`, where nvcc is on the PATH.

One rule: the same source and the same compiler give the same bytes, so that anybody can check what is
shipped. Nothing here runs when ckptfs does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from ckptfs.gpu.fatbin import FATBIN, KERNELS, RECORD, TARGETS, Record, Usage, digests, entry_points
from ckptfs.store.errors import CkptfsError, Corrupt, Unsupported
from ckptfs.store.hashing import chunk_id

_SOURCE = Path(__file__).parent / "native"


def compiler() -> str | None:
    """The version of nvcc, or None where there is none."""
    if shutil.which("nvcc") is None:
        return None
    said = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", said)
    return found[1] if found else None


def build(source: Path = _SOURCE) -> tuple[bytes, Record]:
    """The fatbin of the kernels in `source`, and its record; Unsupported without nvcc."""
    version = compiler()
    if version is None:
        raise Unsupported(
            "the GPU kernels are compiled by nvcc, which is not on the PATH: install a CUDA toolkit"
        )
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / FATBIN
        # PTX of the oldest target only: newer devices compile it. Uncompressed, so that any driver reads it.
        command = ["nvcc", "-std=c++17", "-fatbin", "--no-compress", "-Xptxas=-v", "-o", str(out)]
        command += [f"-gencode=arch={_virtual(target)},code={target}" for target in TARGETS]
        # A relative path: none of this machine gets into the file.
        done = subprocess.run(
            [*command, "kernels.cu"], cwd=source, check=False, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise Corrupt(f"nvcc refused the GPU kernels: {done.stderr.strip()}")
        fatbin = out.read_bytes()
    if entry_points(fatbin) != {target: list(KERNELS) for target in TARGETS}:
        raise Corrupt("nvcc left out some of the GPU kernels")
    return fatbin, Record(version, digests(source), chunk_id(fatbin).hex(), _usage(done.stderr))


def _virtual(target: str) -> str:
    return "compute_" + target.partition("_")[2]


def _usage(report: str) -> dict[str, dict[str, Usage]]:
    """Reads what -Xptxas=-v prints: for each kernel its name, its stack and spills, its registers."""
    usage: dict[str, dict[str, Usage]] = {}
    kernel, target, frame = "", "", (0, 0, 0)
    for line in report.splitlines():
        if named := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            kernel, target = named[1], named[2]
        elif spilt := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            frame = (int(spilt[1]), int(spilt[2]), int(spilt[3]))
        elif used := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found = Usage(int(used[1]), int(shared[1]) if shared else 0, *frame)
            usage.setdefault(target, {})[kernel] = found
    return {target: dict(sorted(usage[target].items())) for target in TARGETS if target in usage}


def main() -> int:
    try:
        fatbin, record = build()
    except CkptfsError as error:
        print(f"build_fatbin: {error}", file=sys.stderr)
        return 1
    (_SOURCE / FATBIN).write_bytes(fatbin)
    (_SOURCE / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    for target, kernels in record.usage.items():
        for kernel, usage in kernels.items():
            spilt = usage.spill_store_bytes + usage.spill_load_bytes
            needs = f"{usage.registers:3} registers, {usage.shared_bytes} bytes shared, {spilt} spilt"
            print(f"{target:7} {kernel:16} {needs}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
