"""Stored files that the kernel reads by itself, as tests get at them.

The one rule: what the kernel does by itself shows in `status` alone (kernel_reads), so whoever needs it waits
for it there. A file is looked for in the background; until that is done it is read the ordinary way.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernelmounts import poll
from mounting import Mount
from small_store import safetensors

from ckptfs.daemon.control_client import ControlClient
from ckptfs.daemon.messages import Status

MIB = 1 << 20


def tensors(seed: int, mib: int = 4) -> bytes:
    """A safetensors file of one tensor; its header does not depend on the seed."""
    return safetensors({"w": random.Random(seed).randbytes(mib * MIB)})


def saved(mount: Mount, name: str, content: bytes) -> Path:
    path = mount.path / "run" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    mount.publish("run")
    return path


def kernel_reads(mount: Mount) -> int:
    """What `status` says; asked without starting a command, because it is asked often."""
    holder = json.loads((mount.store / "lock").read_bytes())
    with ControlClient(holder["socket"], os.geteuid()) as client:
        status = client.ask(Status())
    assert isinstance(status, dict)
    return int(status["kernel_reads"])


@contextmanager
def read_by_kernel(mount: Mount, path: Path) -> Iterator[int]:
    """A descriptor of a file that the kernel reads by itself, and that nobody else has open."""
    before = kernel_reads(mount)
    until = time.monotonic() + 60
    while True:
        fd = os.open(path, os.O_RDONLY)
        if kernel_reads(mount) == before + 1:
            break
        os.close(fd)
        poll(lambda: kernel_reads(mount) == before, 30)
        assert time.monotonic() < until, f"{path.name} is not read by the kernel:\n{mount.log_tail()}"
    try:
        yield fd
    finally:
        os.close(fd)


def is_read_by_kernel(mount: Mount, path: Path) -> bool:
    """Whether it is, once whatever is looked for in the background was found."""
    probe = mount.path / "probe" / "probe.safetensors"
    probe.parent.mkdir(exist_ok=True)
    probe.write_bytes(tensors(99))
    path.open("rb").close()
    mount.publish("probe")
    # One at a time is looked for. So when this is found that is begun after the other, the other is, too.
    with read_by_kernel(mount, probe):
        before = kernel_reads(mount)
        with path.open("rb"):
            return kernel_reads(mount) > before


def whole(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size + 1, 0)
