"""Installs PyCUDA without a CUDA toolkit: `python -m ckptfs.gpu.build_pycuda [ARGUMENTS OF PIP INSTALL]`.

One rule: nothing of the machine's CUDA gets into the build but headers. They come from the packages
`nvidia-cuda-runtime` and `nvidia-cuda-profiler-api` (13.0), or from a toolkit whose `nvcc` is on the PATH.

PyCUDA comes as source only, and left alone it links libcurand, which nobody here needs, and libcuda, which
exists where a driver is installed and not where one builds. So it is configured by a file in a home folder of
its own, and linked against a library of the driver's name that has one of its functions: with none the
linker would leave the name out, and the module would not look for the driver.
Only the standard library is used, so that the file runs on its own too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

REQUIREMENT = "pycuda==2026.1"
_HEADERS = ("cuda.h", "cudaProfiler.h")


def headers() -> Path | None:
    """The folder with CUDA's headers, or None."""
    candidates = [Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "include"]
    if (nvcc := shutil.which("nvcc")) is not None:
        candidates.append(Path(nvcc).resolve().parent.parent / "include")
    candidates.append(Path("/usr/local/cuda/include"))
    for folder in candidates:
        if all((folder / name).is_file() for name in _HEADERS):
            return folder
    return None


def install(include: Path, arguments: Sequence[str]) -> int:
    """Runs `pip install` with `arguments`; returns its exit status."""
    with tempfile.TemporaryDirectory() as home:
        stub = Path(home) / "stub"
        stub.mkdir()
        source = stub / "stub.c"
        source.write_text("int cuInit(unsigned flags) { return (int)flags; }\n")
        library = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", str(stub / "libcuda.so"), str(source)]
        subprocess.run(["cc", *library], check=True)
        settings = {
            "CUDA_INC_DIR": [str(include)],
            "CUDADRV_LIB_DIR": [str(stub)],
            "CUDA_ENABLE_CURAND": False,
            # Boost's hundred warnings would hide an error. PyCUDA only passes calls on: -O0 builds sooner.
            "CXXFLAGS": ["-w", "-O0"],
        }
        lines = [f"{name} = {value!r}\n" for name, value in settings.items()]
        (Path(home) / ".aksetup-defaults.py").write_text("".join(lines))
        pip = [sys.executable, "-m", "pip", "install", *arguments]
        return subprocess.run(pip, env=_environment(home), check=False).returncode


def _environment(home: str) -> dict[str, str]:
    """With another home folder, where pip still finds its user's configuration."""
    environment = dict(os.environ)
    for place in (".config/pip/pip.conf", ".pip/pip.conf"):
        if (Path.home() / place).is_file():
            environment.setdefault("PIP_CONFIG_FILE", str(Path.home() / place))
    environment["HOME"] = home
    return environment


def main() -> int:
    include = headers()
    if include is None:
        print(
            "build_pycuda: no CUDA headers here: pip install 'nvidia-cuda-runtime==13.0.*' "
            "'nvidia-cuda-profiler-api==13.0.*' first, or put a toolkit's nvcc on the PATH",
            file=sys.stderr,
        )
        return 1
    if shutil.which("cc") is None or shutil.which("g++") is None:
        print("build_pycuda: needs a C++ compiler; on Debian: apt-get install g++", file=sys.stderr)
        return 1
    return install(include, sys.argv[1:] or [REQUIREMENT])


if __name__ == "__main__":
    sys.exit(main())
