"""A command's side of the control socket: ask one question, wait for the answer.

One rule: a command never waits for ever and never touches the mount; a daemon at work says so every
second, so silence means that it is gone or stuck.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from ckptfs.daemon.messages import AnyRequest, Progress, decode_reply, encode_request, error_of
from ckptfs.daemon.peer import peer_of
from ckptfs.store.errors import NotPermitted, Unavailable

CONNECT_S = 5.0
SILENCE_S = 60.0
_RECEIVE_BYTES = 1 << 18


class ControlClient:
    """One connection to the daemon of one mount. Closed by its `with` statement."""

    def __init__(self, path: str, uid: int) -> None:
        """Connect to the daemon of user `uid` at `path`.

        Unavailable if none answers there; NotPermitted if it is another user's (or root's) process.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._received = bytearray()
        try:
            self._socket.settimeout(CONNECT_S)
            self._socket.connect(path)
            self.peer = peer_of(self._socket)
            if self.peer.caller.uid not in (uid, 0):
                raise NotPermitted(f"{path} belongs to user {self.peer.caller.uid}, not to {uid}")
            self._socket.settimeout(SILENCE_S)
        except PermissionError:
            self._socket.close()
            raise NotPermitted("this mount's daemon does not listen to other users") from None
        except OSError as e:
            self._socket.close()
            raise Unavailable(f"no ckptfs daemon answers ({path}: {e.strerror or e})") from None
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, request: AnyRequest, on_progress: Callable[[Progress], None] | None = None) -> object:
        """The result of a request; the daemon's error is raised here as its own type."""
        try:
            self._socket.sendall(encode_request(request))
            while True:
                reply = decode_reply(self._line())
                if reply.progress is None:
                    break
                if on_progress is not None:
                    on_progress(reply.progress)
        except TimeoutError:
            raise Unavailable(f"the daemon (process {self.peer.pid}) does not answer") from None
        except OSError as e:
            raise Unavailable(f"the daemon went away: {e.strerror or e}") from None
        if reply.error is not None:
            raise error_of(reply.error)
        return reply.result

    def open_process(self) -> int:
        """A descriptor that becomes readable when the daemon's process ends; the caller closes it."""
        return os.pidfd_open(self.peer.pid)

    def _line(self) -> bytes:
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            more = self._socket.recv(_RECEIVE_BYTES)
            if not more:
                raise Unavailable("the daemon ended before it had answered")
            self._received += more
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line
