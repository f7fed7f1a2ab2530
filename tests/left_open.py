"""Indexes that a test leaves open, as a process that dies does, are closed when it ends.

One rule: in the thread that opened them. LMDB's write lock is a robust mutex, which its owner alone can let
go. Where an index is garbage that another thread collects, its memory is unmapped while the owner's list of
such locks still leads there, and what unlocks the next one is killed by SIGSEGV, some tests later.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet

from ckptfs.store.index import Index

_open: WeakSet[Index] = WeakSet()


def watch() -> None:
    """Note every index that is opened from now on, until it is closed."""
    make, end = Index.__init__, Index.close

    def noted(self: Index, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        _open.add(self)

    def struck_off(self: Index) -> None:
        _open.discard(self)
        end(self)

    Index.__init__, Index.close = noted, struck_off  # type: ignore[method-assign]


def opened() -> set[Index]:
    """Those that are open now."""
    return set(_open)


def close(left: set[Index]) -> None:
    """Close those that this thread has opened, without a commit, which would heal what a death left."""
    for one in left & set(_open):
        if one._thread == threading.get_ident():
            _open.discard(one)
            one._transaction.abort()
            one._env.close()
