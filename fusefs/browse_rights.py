"""What rights a directory may show where it is reached without the directories above it.

One rule: a shorter way opens to nobody what the long way keeps closed.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from typing import Protocol

_SEARCH = 0o111


class Guard(Protocol):
    """A directory on the long way: a live inode or a saved entry."""

    @property
    def mode(self) -> int: ...
    @property
    def gid(self) -> int: ...


def mode_behind(mode: int, gid: int, between: Iterable[Guard]) -> int:
    """The mode of a directory of group `gid` that is reached without the directories `between`.

    Others keep their bits if everybody can search each of those. The group keeps its bits if each
    can be searched by everybody, or by owner and group where it is of the same group. The owner
    keeps what is the owner's.
    """
    for guard in between:
        if guard.mode & _SEARCH == _SEARCH:
            continue
        mode &= ~stat.S_IRWXO
        if guard.gid != gid or guard.mode & 0o110 != 0o110:
            mode &= ~stat.S_IRWXG
    return mode


def mode_today(mode: int, gid: int, live: Guard) -> int:
    """The mode of a saved directory of group `gid` that is still there as `live`: group and others
    have no more rights than both give them. The owner keeps what is the owner's."""
    others = live.mode & stat.S_IRWXO
    group = live.mode & stat.S_IRWXG if live.gid == gid else others << 3
    return mode & ~(stat.S_IRWXG | stat.S_IRWXO) | mode & (group | others)
