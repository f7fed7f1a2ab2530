"""The daemon with a part of the hand-over switched off, for handover_mutants.py.

    mutant_daemon.py MUTANT DIES ARGUMENTS OF CKPTFS…

One rule: only its own process is changed. DIES is 1 if it is to kill itself just behind a change that it has
journaled, one that chance has chosen.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

from dying_daemon import Steps

from ckptfs.daemon import open_store
from ckptfs.daemon.cli import main
from ckptfs.fusefs import kernel
from ckptfs.fusefs.face import Face
from ckptfs.fusefs.kept_notes import Kind, Notes
from ckptfs.fusefs.kept_state import KeptState
from ckptfs.fusefs.requests import Requests
from ckptfs.store.index import Index

MOST_CHANGES = 300


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _without(*kinds: Kind) -> None:
    """These notes are known to this daemon, and to no other."""
    append = Notes._append

    def kept(self: Notes, frame: bytes) -> None:
        if frame[0] not in kinds:
            append(self, frame)

    Notes._append = kept  # type: ignore[method-assign]


def _counts_for_itself() -> None:
    counts: dict[int, int] = {}
    count, set_count = KeptState.count, KeptState.set_count

    def counted(self: KeptState, kind: int, key: int) -> int:
        return counts.get(key, 0) if kind == Kind.HELD else count(self, kind, key)

    def set_counted(self: KeptState, kind: int, key: int, number: int) -> None:
        if kind == Kind.HELD:
            counts[key] = number
        else:
            set_count(self, kind, key, number)

    KeptState.count, KeptState.set_count = counted, set_counted  # type: ignore[method-assign]


def _recovers_alone() -> None:
    recover = open_store.recover

    def recovered(*args: Any, **kwargs: Any) -> Any:
        return recover(*args, **{**kwargs, "is_held": lambda ino: False})

    open_store.recover = recovered


def _die_behind_a_change(*, of_handles: bool) -> None:
    steps = Steps(random.SystemRandom().randrange(1, MOST_CHANGES))
    if not of_handles:
        Index.apply = steps.around(Index.apply, "apply")  # type: ignore[method-assign]
        return
    add = Requests.add

    def added(self: Requests, kind: Kind, key: int) -> None:
        add(self, kind, key)
        if kind == Kind.HANDLE:
            steps.step("after an open was counted")

    Requests.add = added  # type: ignore[method-assign]


SWITCH_OFF: dict[str, Callable[[], object]] = {
    "request": lambda: setattr(Requests, "record", _nothing),
    "resend": lambda: setattr(kernel, "ask_again", _nothing),
    "reopen": lambda: setattr(Face, "_reopen", _nothing),
    "handles": lambda: setattr(Requests, "handle", property(_nothing)),
    "held": _counts_for_itself,
    "orphans": _recovers_alone,
    "backing": lambda: _without(Kind.BACKING),
    "nodes": lambda: _without(Kind.NODE, Kind.HELD),
    "saved": lambda: _without(Kind.SAVED),
}


if __name__ == "__main__":
    name, dies = sys.argv[1:3]
    del sys.argv[1:3]
    SWITCH_OFF[name]()
    if dies == "1":
        _die_behind_a_change(of_handles=name == "handles")
    main()
