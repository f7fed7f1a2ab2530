"""Whether all that was kept of a session can be read, before anything is done with it.

One rule: what a daemon reads of a state later, in whichever part, is read here first. So a state is refused
as a whole, by one line, and never half-way through a start.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptfs.fusefs.browse_nodes import decode_node
from ckptfs.fusefs.kept_notes import Kind
from ckptfs.fusefs.kept_open import decode_open
from ckptfs.fusefs.kept_state import KeptState
from ckptfs.store.errors import Corrupt


def check_kept(state: KeptState) -> None:
    """Corrupt names the first thing that cannot be read."""
    for kind in Kind:
        for key, value in state.notes.items(kind):
            try:
                _CHECKS[kind](value)
            except Corrupt as e:
                raise Corrupt(f"what was kept as {kind.name} of {key} is damaged: {e}") from None
    for count in state.counted:
        if count.unique and count.kind not in (Kind.HANDLE, Kind.HELD):
            raise Corrupt(f"a count of kind {count.kind} was kept")


def _of_length(length: int) -> Callable[[bytes], object]:
    def check(value: bytes) -> None:
        if len(value) != length:
            raise Corrupt(f"{len(value)} bytes and not {length}")

    return check


_CHECKS: dict[Kind, Callable[[bytes], object]] = {
    Kind.HANDLE: _of_length(8),
    Kind.BACKING: _of_length(8),
    Kind.SEGMENT: _of_length(16),
    Kind.SPLIT: _of_length(0),
    Kind.LEFT: decode_open,
    Kind.NODE: decode_node,
    Kind.HELD: _of_length(8),
    Kind.SAVED: decode_open,
    Kind.UNPRIVILEGED: _of_length(0),
    Kind.FAILED: _of_length(8),
    Kind.LETTING_GO: _of_length(8),
    Kind.SUSPECT: _of_length(0),
    Kind.DAMAGED: _of_length(0),
}
