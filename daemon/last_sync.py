"""Before the daemon ends: what is still in staging is made durable where it lies.

One rule: durable first, ingested later. A stop costs one sync of the file system, however many files
wait, and after it every one of them is marked as synced, so that a later power cut takes nothing. (A
hand-over is no stop: the next daemon goes on with what is in staging.)
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import trio

from ckptfs.fusefs.namespace import Namespace, key_of
from ckptfs.store.disk import Disk
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.inode import Content, encode_inode
from ckptfs.store.pins import decode_pin, encode_pin
from ckptfs.store.staging import Staging

_SLICE = 256


async def sync_staging(
    disk: Disk, index: Index, namespace: Namespace, staging: Staging, directories: list[int]
) -> int:
    """Sync every staging file that a file of `directories` or a pre-image names; how many.

    Those of which a sync has failed before are left out: this one's success says nothing of them.
    Durable when: this returned. OSError if the disk refuses; then nothing is marked.
    """
    if not any(True for _ in _unsynced(namespace, directories)) and not index.scan(Table.PREIMAGE, limit=1):
        return 0
    await trio.to_thread.run_sync(disk.sync_all)
    change = Change()
    for ino in _unsynced(namespace, directories):
        inode = namespace.inode(ino)
        if inode.content.staging in staging.failed:
            continue
        marked = msgspec.structs.replace(inode, content=_synced(inode.content))
        change.put(Table.INODE, key_of(ino), encode_inode(marked))
    for key, value in index.scan(Table.PREIMAGE):
        pin = decode_pin(value)
        if pin.inode.content.staging in staging.failed:
            continue
        inode = msgspec.structs.replace(pin.inode, content=_synced(pin.inode.content))
        change.put(Table.PREIMAGE, key, encode_pin(msgspec.structs.replace(pin, inode=inode)))
    index.apply(change, sync=True)
    return len(change.operations)


def _unsynced(namespace: Namespace, directories: list[int]) -> Iterator[int]:
    seen: set[int] = set()
    for directory in directories:
        after = -1
        while rows := namespace.entries(directory, after, _SLICE):
            after = rows[-1][0]
            for _, _, ino in rows:
                inode = namespace.find(ino)
                if inode is None or ino in seen or not inode.content.staging or inode.content.synced:
                    continue
                seen.add(ino)
                yield ino


def _synced(content: Content) -> Content:
    return msgspec.structs.replace(content, synced=True) if content.staging else content
