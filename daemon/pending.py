"""How much waits for ingest.

One rule: nobody waits for the answer but who asked: it is found in steps.
"""

from __future__ import annotations

import trio

from ckptfs.fusefs.face import Face

_SLICE = 256


async def pending_bytes(face: Face) -> int:
    """Bytes in closed files that wait for ingest; unversioned directories wait for nothing."""
    pending = 0
    for directories in face.publisher.changed_dirs_by_unit().values():
        for directory in directories:
            after = -1
            while rows := face.namespace.entries(directory, after, _SLICE):
                after = rows[-1][0]
                pending += sum(_pending_of(face, ino) for _, _, ino in rows)
                await trio.lowlevel.checkpoint()
    return pending


def _pending_of(face: Face, ino: int) -> int:
    inode = face.namespace.find(ino)
    if inode is None or not inode.content.staging or face.files.is_written(ino):
        return 0
    return face.namespace.attributes_of(ino, inode).size
