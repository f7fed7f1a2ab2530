"""A user's probe: a shell command that says whether a version will do.

One rule: whatever it says is read and most of it thrown away, so it neither fills the disk or the memory of
whoever drills, nor waits for a reader; and it cannot hang, nor leave processes of its group behind.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptfs.daemon.drill_loading import kill_group

KEPT_BYTES = 4096
"""How much is kept of the beginning, and again of the end."""
_READ_BYTES = 1 << 16
# A pipe holds no more (fs.pipe-max-size): as much may be in it when the child has ended.
_PIPE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe has come to; `code` None: it took too long. `said` is the beginning and the end of
    `said_bytes`, stdout and stderr together."""

    code: int | None
    said: str
    said_bytes: int
    took_s: float


@dataclass(slots=True)
class _Kept:
    """The beginning and the end of a stream of bytes."""

    head: bytes = b""
    tail: bytes = b""
    size: int = 0

    def add(self, part: bytes) -> None:
        """The stream goes on with these."""
        self.size += len(part)
        room = KEPT_BYTES - len(self.head)
        self.head += part[:room]
        self.tail = (self.tail + part[room:])[-KEPT_BYTES:]

    def text(self) -> str:
        """What is kept, and how much is left out between."""
        left_out = self.size - len(self.head) - len(self.tail)
        between = f"\n[{left_out} bytes are left out]\n".encode() if left_out else b""
        return (self.head + between + self.tail).decode(errors="replace").strip()


@dataclass(slots=True)
class _Output:
    """The pipe into which a child writes."""

    fd: int
    kept: _Kept = field(default_factory=_Kept)

    def drain(self, until: float, ended_fd: int) -> None:
        """Read until `ended_fd` says that the child has ended, or the time (monotonic) is over."""
        poll = select.poll()
        poll.register(ended_fd, select.POLLIN)
        poll.register(self.fd, select.POLLIN)
        while (left_s := until - time.monotonic()) > 0:
            ready = dict(poll.poll(left_s * 1000))
            if ended_fd in ready:
                return
            if self.fd in ready and not self._read():
                poll.unregister(self.fd)  # The child has closed it, and goes on.

    def drain_rest(self) -> None:
        """Read what is in the pipe. Who holds its other end, and left the group, may go on for ever."""
        os.set_blocking(self.fd, False)
        most = self.kept.size + _PIPE_BYTES
        while self.kept.size < most and self._read():
            pass

    def _read(self) -> bool:
        try:
            part = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        self.kept.add(part)
        return bool(part)


def run_probe(command: str, folder: str, environment: Mapping[str, str], limit_s: float) -> Probed:
    """Run a shell command in `folder`, with CKPTFS_DRILL_DIR naming it."""
    began = time.monotonic()
    child = subprocess.Popen(
        ["/bin/sh", "-c", command],
        cwd=folder,
        env={**environment, "CKPTFS_DRILL_DIR": folder},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert child.stdout is not None
    output, ended_fd = _Output(child.stdout.fileno()), os.pidfd_open(child.pid)
    with child.stdout:
        try:
            output.drain(began + limit_s, ended_fd)
        finally:
            code = child.poll()
            kill_group(child)
            child.wait()
            os.close(ended_fd)
        output.drain_rest()
    return Probed(code, output.kept.text(), output.kept.size, time.monotonic() - began)
