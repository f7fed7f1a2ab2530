"""Who may ask what: the rule that the kernel applies to the mount, applied to the control socket.

One rule: a decision is a pure function of the caller and of the modes on the way to a path; how
the caller and the modes were found out is not known here.

Source: path_resolution(7) and ARCHITECTURE.md, section 8: whoever may read a path by its modes may
log, diff and verify it, whoever may write it may publish, tag and roll it back.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

ROOT_UID = 0


class Access(IntFlag):
    """What is asked of one file or directory; the bits are those of one octal digit of a mode."""

    SEARCH = 1
    WRITE = 2
    READ = 4


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who asks: effective user, and all groups (the effective one too)."""

    uid: int
    gids: frozenset[int]

    @property
    def is_root(self) -> bool:
        """Whether no mode binds this caller."""
        return self.uid == ROOT_UID


@dataclass(frozen=True, slots=True)
class Modes:
    """Mode and owners of one file or directory."""

    mode: int
    uid: int
    gid: int


def grants(caller: Caller, step: Modes, wanted: Access) -> bool:
    """Whether the modes of one file or directory give `caller` all of `wanted`.

    The first class that the caller belongs to decides, even if a later one would grant more.
    """
    if caller.is_root:
        return not wanted & Access.SEARCH or stat.S_ISDIR(step.mode) or bool(step.mode & 0o111)
    if caller.uid == step.uid:
        granted = step.mode >> 6
    elif step.gid in caller.gids:
        granted = step.mode >> 3
    else:
        granted = step.mode
    return granted & wanted == wanted


def may(caller: Caller, way: Sequence[Modes], wanted: Access) -> bool:
    """Whether `caller` may have `wanted` at the end of `way`.

    `way` leads from the root to the path itself, both included: every step before the last is a
    directory that must grant SEARCH.
    """
    *ancestors, last = way
    return all(grants(caller, step, Access.SEARCH) for step in ancestors) and grants(caller, last, wanted)
