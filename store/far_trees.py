"""Saved directories for worker threads.

One rule: the index thread only reads the bytes: to decode ten thousand entries takes a third of a second, in
which a mount would answer nobody.
"""

from __future__ import annotations

import trio

from ckptfs.store.ids import TreeId
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry, decode_tree


def read_tree_there(segments: Segments, identity: TreeId) -> tuple[Entry, ...]:
    """As Segments.read_tree, from a worker thread that the index thread has started."""
    found = trio.from_thread.run_sync(segments.tree_or_bytes, identity)
    if isinstance(found, bytes):
        found = decode_tree(found)
        trio.from_thread.run_sync(segments.keep_tree, identity, found)
    return found
