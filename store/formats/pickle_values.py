"""The values that a walked pickle is made of.

One rule: no value is ever hashed, compared or printed as a whole. Shared tuples can spell an
exponentially large tree, and only identity tells that it is small.

Source: the object model of the opcode documentation in Lib/pickletools.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Unwalkable(Exception):
    """The pickle is broken, too large, or does something that is not in the table."""


class Opaque(Enum):
    """A value that is there but of no interest (bytes, floats, sets, huge integers)."""

    VALUE = "opaque"


@dataclass(frozen=True, slots=True)
class Global:
    """A reference to something importable."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Persistent:
    """What `persistent_load` would be asked for."""

    pid: object


class Pairs(list[tuple[object, object]]):
    """A dict as the list of its pairs: keys are not hashed, and an equal key does not replace."""

    __slots__ = ()


@dataclass(slots=True)
class Made:
    """An object that calling `called` with `arguments` would make; what BUILD gave it is `state`.

    `elements` were appended to it, `pairs` set on it.
    """

    called: object
    arguments: object
    state: object = None
    elements: list[object] | None = None
    pairs: Pairs | None = None
