"""The daemon's end of one process that cuts and hashes.

One rule: a worker whose answer was not waited for is never asked again; it would answer the next with that.

Belongs to one task, or to one thread that a task lent it to.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import trio

from ckptfs.daemon.hashing_process import REPLY, cut_request, hash_request
from ckptfs.daemon.idling import may_be_hurried, set_idle
from ckptfs.store.ids import DIGEST_BYTES
from ckptfs.store.spans import Cuts, Span

log = logging.getLogger(__name__)
HURRIED_AFTER_S = 1.0
GIVEN_UP_AFTER_S = 60.0
_END_S = 5.0
_REPLY_BYTES = 1 << 20
_LENGTH_BYTES = array("I").itemsize


class Worker:
    """One process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    # Never looked for below the working directory, which may lie in the mount.
                    [sys.executable, "-P", "-m", "ckptfs.daemon.hashing_process"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                )
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        self._socket = ours
        self._started_s = time.monotonic()
        self._is_idle = False
        self._is_waiting = False

    @property
    def is_waiting(self) -> bool:
        """Whether it has answered what it was asked."""
        return self._is_waiting

    def is_ready(self) -> bool:
        """Whether one that was started has said that it is ready."""
        try:
            self._is_waiting = bool(self._socket.recv(_REPLY_BYTES))
        except OSError:
            pass  # not yet, or it is gone
        return self._is_waiting

    def is_overdue(self) -> bool:
        """Whether one that was started should have been ready long ago."""
        return not self._is_waiting and time.monotonic() - self._started_s > GIVEN_UP_AFTER_S

    async def cut(self, fd: int, spans: Sequence[Span]) -> list[Cuts] | None:
        """The cuts of spans that follow one another; None if this process died or cannot read them."""
        reply = b""
        if self._ask(fd, cut_request(spans)):
            for patience_s in (HURRIED_AFTER_S, GIVEN_UP_AFTER_S):
                with trio.move_on_after(patience_s):
                    await trio.lowlevel.wait_readable(self._socket)
                    reply = self._take_reply()
                    break
                self.set_idle(False)
        return _decoded(reply, spans) if self._has_answered(reply) else None

    def ids(self, fd: int, starts: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint32]) -> bytes | None:
        """As PlaceHasher in store/bad_chunks.py. Blocking, for a thread."""
        reply = b""
        if self._ask(fd, hash_request(starts, lengths)):
            try:
                self._socket.settimeout(GIVEN_UP_AFTER_S)
                reply = self._take_reply()
                self._socket.setblocking(False)
            except OSError:
                pass  # somebody has killed it
        if not self._has_answered(reply) or len(reply) != REPLY.size + DIGEST_BYTES * len(starts):
            return None
        return reply[REPLY.size :]

    def _ask(self, fd: int, request: bytes) -> bool:
        self._is_waiting = False
        try:
            socket.send_fds(self._socket, [request], [fd])
        except OSError:
            return False
        return True

    def _take_reply(self) -> bytes:
        try:
            return self._socket.recv(_REPLY_BYTES)
        except OSError:
            return b""

    def _has_answered(self, reply: bytes) -> bool:
        self._is_waiting = bool(reply)
        if not reply:
            log.warning("a process that hashes files has died or is stuck; its part is done here")
        return self._is_waiting

    def set_idle(self, is_idle: bool) -> None:
        """Whether it runs only when nothing else wants the core; always False where that is for ever."""
        if is_idle == self._is_idle or (is_idle and not may_be_hurried()):
            return
        if set_idle(self._process.pid, is_idle):
            self._is_idle = is_idle

    def kill(self) -> None:
        """Whatever it does. It is not waited for: on a busy machine that may take its time."""
        self.set_idle(False)
        # A thread that waits for an answer gets an end instead.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.kill()

    def has_ended(self) -> bool:
        """Whether a killed one is gone."""
        has_ended = self._process.poll() is not None
        if has_ended:
            self._socket.close()
        return has_ended

    def wait(self) -> None:
        """Until a killed one is gone, for a while."""
        try:
            self._process.wait(_END_S)
            self._socket.close()
        except subprocess.TimeoutExpired:
            log.warning("a process that hashes files does not end")


def _decoded(reply: bytes, spans: Sequence[Span]) -> list[Cuts] | None:
    """None: it could not read the file, or it is of another version of the program."""
    (total,) = REPLY.unpack_from(reply)
    lengths_at = REPLY.size + len(spans) * _LENGTH_BYTES
    ids_at = lengths_at + total * _LENGTH_BYTES
    if not total or len(reply) != ids_at + total * DIGEST_BYTES:
        return None
    counts, lengths = array("I", reply[REPLY.size : lengths_at]), array("I", reply[lengths_at:ids_at])
    if sum(counts) != total:
        return None
    cut, first = [], 0
    for span, count in zip(spans, counts, strict=True):
        ids = reply[ids_at + first * DIGEST_BYTES : ids_at + (first + count) * DIGEST_BYTES]
        one = Cuts(span.offset, lengths[first : first + count], ids)
        if not span.end <= span.offset + sum(one.lengths) <= span.limit:
            return None
        cut.append(one)
        first += count
    return cut
