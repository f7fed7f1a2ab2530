"""Telling systemd how the mount is: ready, reloading, stopping, its state in one line, and that it is alive.

One rule: "alive" is said only after another process has asked the mount something and got its answer since
the last time; so a loop that runs beside a mount that hangs, or the other way round, is not called alive.

Without $NOTIFY_SOCKET nothing is said to anybody. Source: sd_notify(3).
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping

import trio

log = logging.getLogger(__name__)
_STATUS_EVERY_S = 10.0
_READY_S = 10.0
_MICROSECONDS = 1_000_000
_TIMEVAL = struct.Struct("@ll")
_PATIENCE_S = 1


class ServiceManager:
    """The service manager that started us, if one did. Belongs to the trio thread.

    `_is_ready`: it was told that the mount is ready, so it may be told of a reload.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._is_ready = False
        timeout = environment.get("WATCHDOG_USEC", "")
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.is_there = bool(self._address)
        self._room = environment.get("FDSTORE", "")
        self.watchdog_s = int(timeout) / _MICROSECONDS if timeout.isdecimal() and is_ours else 0.0

    def tell(self, **fields: str) -> None:
        """One message: READY="1", STATUS="…". Nobody hears it who has gone meanwhile."""
        self._send("\n".join(f"{key}={value}" for key, value in fields.items()).encode(), [])

    def _send(self, message: bytes, fds: list[int]) -> str:
        """Returns why it could not be told, "" if it was. To give it `fds`, which happens once in our life, a
        queue that is full is waited for."""
        if not self._address:
            return "there is none"
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.setblocking(bool(fds))
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(_PATIENCE_S, 0))
            try:
                # socket.send_fds of Python 3.11 takes an address and does not use it.
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
                channel.sendmsg([message], rights, 0, address)
            except OSError as e:
                log.warning("the service manager could not be told: %s", e)
                return f"it could not be told: {e.strerror or e}"
        return ""

    def reloading(self) -> None:
        """The configuration is being read again."""
        if self._is_ready:
            self.tell(RELOADING="1", MONOTONIC_USEC=str(time.monotonic_ns() // 1000))

    def reloaded(self) -> None:
        """That has ended."""
        if self._is_ready:
            self.tell(READY="1")

    def keep(self, fds: Mapping[str, int]) -> str:
        """Have descriptors kept over our death, and passed to the next daemon under these names: all, or
        none. Returns why they are not, "" if they are.

        Who does not keep them does not say so, so it must have said before that it has room for them:
        $FDSTORE. systemd does from 254 on; for an older one our installation says it in the unit."""
        if not self._address:
            return "there is none"
        if not self._room.isdecimal():
            return (
                "the unit has no FileDescriptorStoreMax=4; or systemd is older than 254, which does not say: "
                "then the unit needs Environment=FDSTORE=4 as well"
            )
        if int(self._room) < len(fds):
            return f"FileDescriptorStoreMax={self._room} of the unit is too small: set it to 4"
        refusal = ""
        for name, fd in fds.items():
            refusal = refusal or self._send(f"FDSTORE=1\nFDNAME={name}".encode(), [fd])
        for name in fds if refusal else ():
            self.let_go(name)
        return refusal

    def let_go(self, name: str) -> None:
        """Have what was kept under a name closed."""
        self.tell(FDSTOREREMOVE="1", FDNAME=name)

    async def run(
        self, look: Callable[[float], Awaitable[bool]], state: Callable[[], Awaitable[str]]
    ) -> None:
        """Say that the mount is ready once `look(seconds)` has seen it answer; then every few seconds how
        things are, and that it is alive as long as it answers. For ever; does nothing if nobody listens."""
        if not self._address:
            return
        while not await look(_READY_S):
            log.warning("the mount does not answer yet")
        self.tell(READY="1", STATUS=await state())
        self._is_ready = True
        pause_s = self.watchdog_s / 4 or _STATUS_EVERY_S
        while True:
            await trio.sleep(pause_s)
            if self.watchdog_s and await look(self.watchdog_s / 2):
                self.tell(WATCHDOG="1")
            with trio.move_on_after(pause_s):
                self.tell(STATUS=await state())
