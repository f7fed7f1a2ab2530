"""The control socket's server: who connects, what they ask, and how much of it at once.

One rule: whatever arrives is answered with one line or the connection ends; it never stops the
daemon, and one caller never makes another wait for more than its own work.

Concurrency: one task a connection, in the nursery of `serve`. `_clients` counts connections by user and
is touched by those tasks only.

Source: messages.py for the lines; unix(7).
"""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from ckptfs.daemon.messages import (
    MAX_REQUEST_BYTES,
    AnyRequest,
    Json,
    Progress,
    decode_request,
    encode_failure,
    encode_progress,
    encode_result,
)
from ckptfs.daemon.peer import Peer, peer_of
from ckptfs.store.errors import CkptfsError, Conflict, InvalidRequest

MAX_CLIENTS = 256
MAX_CLIENTS_PER_USER = 32
IDLE_S = 60.0
SEND_S = 10.0
PROGRESS_EVERY_S = 1.0
_BACKLOG = 64
_PROBE_S = 1.0

log = logging.getLogger(__name__)
Report = Callable[[Progress], None]
Answer = Callable[[AnyRequest, Peer, Report], Awaitable[Json]]


class ControlServer:
    """Answers requests on one Unix socket until it is cancelled."""

    def __init__(self, path: str, answer: Answer, *, everybody: bool) -> None:
        """`answer` carries requests out; `everybody` lets other users connect (their uid decides)."""
        self._path = path
        self._answer = answer
        self._mode = 0o666 if everybody else 0o600
        self._clients: Counter[int] = Counter()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen and answer. Conflict if another daemon answers on this socket."""
        listener = _listen(self._path, self._mode)
        identity = os.lstat(self._path).st_ino
        try:
            async with trio.open_nursery() as nursery:
                task_status.started()
                await trio.serve_listeners(self._connected, [listener], handler_nursery=nursery)
        finally:
            with suppress(FileNotFoundError):
                if os.lstat(self._path).st_ino == identity:
                    os.unlink(self._path)

    async def _connected(self, stream: trio.SocketStream) -> None:
        async with stream:
            try:
                peer = peer_of(stream.socket)
            except OSError:
                return
            uid = peer.caller.uid
            self._clients[uid] += 1
            try:
                if self._clients[uid] > MAX_CLIENTS_PER_USER or self._clients.total() > MAX_CLIENTS:
                    await _send(stream, encode_failure("Unavailable", "too many clients; try again"))
                else:
                    await self._converse(stream, peer)
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as e:
                log.debug("a control client of uid %d went away: %s", uid, e or type(e).__name__)
            finally:
                self._clients[uid] -= 1

    async def _converse(self, stream: trio.SocketStream, peer: Peer) -> None:
        lines = _Lines(stream)
        while True:
            try:
                with trio.fail_after(IDLE_S):
                    line = await lines.next()
                if line is None:
                    return
                request = decode_request(line)
            except InvalidRequest as e:
                await _send(stream, encode_failure("InvalidRequest", str(e)))
                if lines.is_lost:
                    return
                continue
            await _send(stream, await self._at_work(stream, request, peer))

    async def _at_work(self, stream: trio.SocketStream, request: AnyRequest, peer: Peer) -> bytes:
        """The answer's line; meanwhile the caller hears every second that the daemon is at work."""
        log.debug("request %s by uid %d, process %d", type(request).__name__, peer.caller.uid, peer.pid)
        latest = [Progress()]
        answer: bytes | None = None

        async def tell(scope: trio.CancelScope) -> None:
            try:
                while True:
                    await trio.sleep(PROGRESS_EVERY_S)
                    await _send(stream, encode_progress(latest[0]))
            except (trio.BrokenResourceError, trio.TooSlowError):
                if request.is_reading:
                    scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell, nursery.cancel_scope)
            answer = await self._answered(request, peer, lambda progress: latest.__setitem__(0, progress))
            nursery.cancel_scope.cancel()
        if answer is None:
            raise trio.BrokenResourceError("the caller did not wait for the answer")
        return answer

    async def _answered(self, request: AnyRequest, peer: Peer, report: Report) -> bytes:
        """The answer's line, whatever happens."""
        try:
            return encode_result(await self._answer(request, peer, report))
        except CkptfsError as e:
            return encode_failure(type(e).__name__, str(e))
        except OSError as e:
            log.error("request %s failed: %s", type(request).__name__, e)
            return encode_failure("Unavailable", f"the daemon met an error: {e.strerror or e}")
        except Exception:
            log.exception("request %s failed, and that is a bug in ckptfs", type(request).__name__)
            return encode_failure("Unavailable", "the daemon met an error of its own; its log says which")


class _Lines:
    """Cuts what a stream brings into lines of at most MAX_REQUEST_BYTES. One task's own.

    `is_lost` once a line was not one: where the next begins is then anybody's guess.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._received = bytearray()
        self.is_lost = False

    async def next(self) -> bytes | None:
        """The next line without its end; None when the peer has finished; InvalidRequest if too long."""
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            if searched > MAX_REQUEST_BYTES:
                break
            more = await self._stream.receive_some(MAX_REQUEST_BYTES)
            if not more:
                if not self._received.strip():
                    return None
                self.is_lost = True
                raise InvalidRequest("the request ends without a line end")
            self._received += more
        if not 0 <= end <= MAX_REQUEST_BYTES:
            self.is_lost = True
            raise InvalidRequest(f"a request has more than {MAX_REQUEST_BYTES} bytes")
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line


async def _send(stream: trio.SocketStream, line: bytes) -> None:
    # Shielded: half a line would spoil the next one.
    with trio.fail_after(SEND_S, shield=True):
        await stream.send_all(line)


def _listen(path: str, mode: int) -> trio.SocketListener:
    """A listening socket under `path`; a file left by a daemon that died is replaced."""
    if _answers(path):
        raise Conflict(f"another ckptfs daemon listens on {path}")
    with suppress(FileNotFoundError):
        os.unlink(path)
    plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        plain.setblocking(False)
        plain.bind(path)
        os.chmod(path, mode)
        plain.listen(_BACKLOG)
        return trio.SocketListener(trio.socket.from_stdlib_socket(plain))
    except BaseException:
        plain.close()
        raise


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
