"""Loading in a process that may be killed.

One rule: it cannot hang or fill the memory of whoever drills: a child has its own process group, a limit of
memory and a time, and all of it is ended when that is over. What a child says is read up to a bound.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from ckptfs.daemon.drill_report import LoadedFile

_BASE_MEMORY_BYTES = 6 << 30
_COPIES = 3
_MOST_SAID_BYTES = 64 << 20
_READ_BYTES = 1 << 16


def memory_for(sizes: Sequence[int]) -> int:
    """How much address space loading files of these sizes takes at the most: libraries, and some copies."""
    return _BASE_MEMORY_BYTES + _COPIES * max(sizes, default=0)


def load_all(paths: Sequence[str], memory_bytes: int, limit_s: float) -> list[LoadedFile]:
    """Load these files, one after the other. What the child dies of, or takes too long for, is the fault of
    the file that it was at."""
    found: list[LoadedFile] = []
    rest, until = list(paths), time.monotonic() + limit_s
    while rest:
        answers, code = _run(rest, memory_bytes, max(0.1, until - time.monotonic()))
        done = 0
        for line in answers:
            if done == len(rest):
                break
            if line:
                found.append(_decoded(line, rest[done]))
            done += not line
        if done >= len(rest):
            break
        why = f"loading took longer than {limit_s:g} s" if code is None else _why(code, memory_bytes)
        found.append(LoadedFile(path=rest[done], bytes=os.stat(rest[done]).st_size, loader="", error=why))
        rest = [] if code is None else rest[done + 1 :]
    return found


def _run(paths: Sequence[str], memory_bytes: int, limit_s: float) -> tuple[list[bytes], int | None]:
    """(the lines that the child said; an empty one ends what it says of a file), its exit code, None: it took
    too long."""
    with tempfile.TemporaryFile() as asked:
        asked.write(b"".join(json.dumps(path).encode() + b"\n" for path in paths))
        asked.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "ckptfs.daemon.drill_loader", str(memory_bytes)],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    said = bytearray()
    listener = threading.Thread(target=_listen, args=(child, said))
    listener.start()
    try:
        code: int | None = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        kill_group(child)
        child.wait()
        listener.join()
    return bytes(said).split(b"\n")[:-1], code


def _listen(child: subprocess.Popen[bytes], said: bytearray) -> None:
    """Keep what a child says; one that says too much is ended."""
    assert child.stdout is not None
    with child.stdout as stream:
        while part := os.read(stream.fileno(), _READ_BYTES):
            said += part
            if len(said) > _MOST_SAID_BYTES:
                kill_group(child)
                return


def _decoded(line: bytes, path: str) -> LoadedFile:
    """What was said of a file; that it is this one, the order says: a name need not be UTF-8."""
    try:
        return msgspec.json.decode(line, type=LoadedFile).renamed(path)
    except msgspec.DecodeError:
        return LoadedFile(path=path, bytes=0, loader="", error="loading it made the process say nonsense")


def _why(code: int, memory_bytes: int) -> str:
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return f"the process that loaded it {how}; it may use {memory_bytes >> 20} MiB"


def kill_group(child: subprocess.Popen[bytes]) -> None:
    """End a child that leads a session of its own, and what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
