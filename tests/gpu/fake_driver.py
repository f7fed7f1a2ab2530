"""A libcuda.so.1 made by the tests, for unmodified PyCUDA: building it, and asking it what is alive.

One rule: it is loaded in processes of its own, by the linker, as a real driver is.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_NATIVE = Path(__file__).parent / "native"
LIBRARY = "libcuda.so.1"


def pycuda_module() -> Path | None:
    """PyCUDA's extension module, or None where PyCUDA is not installed."""
    spec = importlib.util.find_spec("pycuda")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(iter(sorted(Path(spec.submodule_search_locations[0]).glob("_driver.*.so"))), None)


def build_driver(folder: Path, module: Path, kernels: Path, emulator: Path) -> Path:
    """Links the fake driver into `folder`, which is for LD_LIBRARY_PATH; returns the folder.

    Every symbol that PyCUDA needs and the fake has not becomes a function that says "not supported".
    """
    driver, rest, source = folder / "driver.o", folder / "rest.o", folder / "rest.c"
    compile_to = ["g++", "-std=c++17", "-O1", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror", "-c"]
    _run([*compile_to, str(_NATIVE / "fake_libcuda.cc"), "-o", str(driver)])
    needed = set(re.findall(r" U (cu[A-Z]\w+)", _run(["nm", "-D", str(module)])))
    present = set(re.findall(r" T (cu[A-Z]\w+)", _run(["nm", str(driver)])))
    source.write_text("".join(f"int {name}(void) {{ return 801; }}\n" for name in sorted(needed - present)))
    _run(["gcc", "-fPIC", "-c", str(source), "-o", str(rest)])
    objects = [str(each) for each in (driver, rest, kernels, emulator)]
    link = ["g++", "-shared", "-fsanitize=undefined", f"-Wl,-soname,{LIBRARY}", "-o", str(folder / LIBRARY)]
    _run([*link, *objects])
    return folder


def _run(command: list[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Alive:
    """What of the driver is in use: contexts retained and current in this thread, and objects."""

    retained: int
    most_retained: int
    depth: int
    modules: int
    streams: int
    events: int
    device_memory: int
    host_memory: int
    pending: int


class _Alive(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in Alive.__dataclass_fields__)


class FakeDriver:
    """The fake driver that this process is linked with."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(LIBRARY)
        self.library.fake_alive.restype = _Alive
        self.library.fake_failed.restype = ctypes.c_char_p
        self.library.fake_complaint.restype = ctypes.c_char_p
        self.library.fake_downloaded.restype = ctypes.c_uint64
        self.library.fake_image.restype = ctypes.c_void_p

    def alive(self) -> Alive:
        found = self.library.fake_alive()
        return Alive(*(getattr(found, name) for name in Alive.__dataclass_fields__))

    def reset(self, devices: int = 1, order: int = 0) -> None:
        """As in a new process, with this many devices and this order of threads."""
        self.library.fake_reset(devices, order)

    def fail(self, call: int, code: int) -> None:
        """The function that is call number `call` from now on returns `code`, then and later."""
        self.library.fake_fail(ctypes.c_uint64(call), code)

    def failed(self) -> str:
        """The function that was made to fail, by the name in the reference, or ""."""
        return bytes(self.library.fake_failed()).decode().partition("_")[0]

    def forget(self, kept: int) -> None:
        """All objects but the memory at `kept` are gone, as after the last user of a context."""
        self.library.fake_forget(ctypes.c_uint64(kept))

    def complaint(self) -> str:
        """What the emulator said about a kernel, or ""."""
        return bytes(self.library.fake_complaint()).decode()

    def downloaded(self) -> int:
        """Bytes that have been copied to the host."""
        return int(self.library.fake_downloaded())

    def image(self) -> bytes:
        """The module that was loaded last."""
        size = ctypes.c_size_t()
        start = self.library.fake_image(ctypes.byref(size))
        return ctypes.string_at(start, size.value)
