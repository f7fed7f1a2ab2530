"""Who is at the other end of a Unix socket, as the kernel recorded it when the peer connected.

One rule: nothing that the peer says about itself is believed.

Source: unix(7), SO_PEERCRED; SO_PEERGROUPS (Linux 4.13) gives the groups of that same moment, so no
process has to be looked up by a number that may belong to another one by now.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Protocol

from ckptfs.daemon.rights import Caller

_SO_PEERGROUPS = 59
_CREDENTIALS = struct.Struct("3i")
_MOST_BYTES = 1024  # what Python's getsockopt can take: 256 groups


class Connected(Protocol):
    """The one call that is needed of a socket, be it trio's or the standard library's."""

    def getsockopt(self, level: int, optname: int, buflen: int) -> bytes:
        """As socket.socket.getsockopt."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end; `pid` is for log lines only."""

    pid: int
    caller: Caller


def peer_of(connection: Connected) -> Peer:
    """Who connected. With more than 256 groups only the effective one counts: fewer rights, never more."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(credentials)
    return Peer(pid, Caller(uid & 0xFFFFFFFF, frozenset({gid & 0xFFFFFFFF, *_groups(connection)})))


def _groups(connection: Connected) -> tuple[int, ...]:
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_BYTES)
    except OSError:
        return ()
    return struct.unpack(f"{len(packed) // 4}I", packed)
