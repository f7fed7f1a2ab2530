"""Runs a daemon, keeps what it asks to have kept, and starts it again when it dies: where no systemd is.

    python -m ckptfs.daemon.keeper ckptfs mount /mnt/ckpt --store /var/lib/ckptfs

One rule: it speaks systemd's protocol and nothing else ($FDSTORE; FDSTORE= and FDSTOREREMOVE= on
$NOTIFY_SOCKET; $LISTEN_FDS at the next start), so a daemon does not know which of the two keeps what it
has open.

It ends with the daemon's exit code when that ends with 0, is told to stop, or refuses to start five times.
Source: sd_notify(3), sd_listen_fds(3).
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct
import sys
import time
from array import array
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Final

_FIRST_FD = 3
_MOST_FDS = 16
_F_DUPFD_QUERY = 1027
_CREDENTIALS = struct.Struct("iII")
_INT_BYTES = array("i").itemsize
_MESSAGE_BYTES = 1 << 14
_SHORT_S = 2.0
_MOST_REFUSED = 5
_PAUSE_S = 0.5
_LOOK_S = 0.05
_STOPS: Final = (signal.SIGTERM, signal.SIGINT)
_FORWARDED: Final = (*_STOPS, signal.SIGHUP, signal.SIGUSR1)


class Keeper:
    """One daemon, started again and again; and the (name, fd) pairs that are kept for it.

    `_pid` and `_process` are the daemon's number and a descriptor of it, 0 and -1 while there is none. They
    change only while the signals that are forwarded are blocked, so each of these reaches a daemon, or is
    seen before the next one is started.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._address = f"@ckptfs-keeper-{os.getpid()}-{time.monotonic_ns()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("\0" + self._address[1:])
        self._kept: list[tuple[str, int]] = []
        self._pid, self._process = 0, -1
        self._stops = False
        self._hands_over = False

    def run(self) -> int:
        """Returns the exit code, that of a shell if the daemon was killed."""
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        refused, code = 0, 0
        while True:
            begun = time.monotonic()
            if not self._start():
                return code if code >= 0 else 128 - code
            code = self._ended()
            refused = refused + 1 if code > 0 and time.monotonic() - begun < _SHORT_S else 0
            goes_on = code != 0 or self._hands_over
            if not goes_on or self._stops or refused >= _MOST_REFUSED:
                return code if code >= 0 else 128 - code
            self._hands_over = False
            until = time.monotonic() + (_PAUSE_S if refused else 0)
            while not self._stops and time.monotonic() < until:
                time.sleep(_LOOK_S)

    def _start(self) -> bool:
        """False if it was told to stop meanwhile."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        try:
            if self._stops:
                return False
            self._pid = os.fork()
            if not self._pid:
                self._become_daemon(before)
            self._process = os.pidfd_open(self._pid)
            return True
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _ended(self) -> int:
        """Wait for its end; its exit code, below 0 the signal."""
        while True:
            ready, _, _ = select.select([self._socket.fileno(), self._process], [], [])
            while select.select([self._socket.fileno()], [], [], 0)[0]:
                self._hear()  # all that it said before it ended, also after the socket was looked at
            if self._process in ready:
                break
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            os.close(self._process)
            self._pid, self._process = 0, -1
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return code

    def _become_daemon(self, mask: Iterable[int]) -> None:
        try:
            environment = {**os.environ, "NOTIFY_SOCKET": self._address, "FDSTORE": str(_MOST_FDS)}
            if self._kept:
                copies = [os.dup(fd) for _, fd in self._kept]  # none of them below the numbers to be given
                for at, fd in enumerate(copies):
                    os.dup2(fd, _FIRST_FD + at, inheritable=True)
                environment["LISTEN_PID"] = str(os.getpid())
                environment["LISTEN_FDS"] = str(len(copies))
                environment["LISTEN_FDNAMES"] = ":".join(name for name, _ in self._kept)
            for number in _FORWARDED:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execvpe(self._command[0], self._command, environment)
        except BaseException as e:
            os.write(2, f"{self._command[0]}: {e}\n".encode())
        finally:
            os._exit(127)

    def _received(self) -> tuple[bytes, list[int], int]:
        """A message, the descriptors that came with it, and the number of the process that sent it."""
        room = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(_MOST_FDS * _INT_BYTES)
        message, extras, _, _ = self._socket.recvmsg(_MESSAGE_BYTES, room)
        fds, sender = array("i"), 0
        for level, kind, content in extras:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % _INT_BYTES])
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                sender = _CREDENTIALS.unpack(content)[0]
        return message, list(fds), sender

    def _hear(self) -> None:
        message, fds, sender = self._received()
        if sender != self._pid:
            # The name of the socket is no secret.
            for fd in fds:
                os.close(fd)
            return
        fields = dict(line.partition("=")[::2] for line in message.decode(errors="replace").split("\n"))
        name = fields.get("FDNAME", "stored")
        if fields.get("FDSTORE") == "1":
            for fd in fds:
                self._keep(name, fd)
            return
        for fd in fds:
            os.close(fd)
        if fields.get("FDSTOREREMOVE") == "1":
            for gone, fd in self._kept:
                if gone == name:
                    os.close(fd)
            self._kept = [one for one in self._kept if one[0] != name]

    def _keep(self, name: str, fd: int) -> None:
        """As systemd does: the same one is kept once under a name, and none that there is no room for."""
        is_kept = any(one == name and _is_same(fd, kept) for one, kept in self._kept)
        if is_kept or len(self._kept) >= _MOST_FDS:
            os.close(fd)
            return
        os.set_inheritable(fd, False)
        self._kept.append((name, fd))

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if number in _STOPS:
            self._stops = True
        elif number == signal.SIGUSR1 and self._pid:
            self._hands_over = True
        if self._pid:
            signal.pidfd_send_signal(self._process, signal.Signals(number))


def _is_same(one: int, other: int) -> bool:
    """Whether two numbers are one open file. A kernel before 6.10 does not say: then they are taken for two,
    because /dev/fuse is one file that has another session each time that it is opened."""
    try:
        return fcntl.fcntl(one, _F_DUPFD_QUERY, other) == 1
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(Keeper(sys.argv[1:]).run())
