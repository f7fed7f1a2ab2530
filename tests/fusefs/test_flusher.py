"""The flusher on a real tree, with a staging file that nobody syncs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import trio
from small_store import SmallStore

from ckptfs.fusefs.face import Face, FaceSettings, StoreParts
from ckptfs.fusefs.storing import Waiting
from ckptfs.store.disk import Space
from ckptfs.store.histories import Histories
from ckptfs.store.inode import ROOT_INO


class PlentyOfRoom:
    """A disk that is never full."""

    def __init__(self, space: Callable[[], Space]) -> None:
        self.space = space

    async def before_writing(self) -> None:
        return None

    async def make_room(self, wanted_bytes: int) -> bool:
        return False


def face_on(store: SmallStore) -> Face:
    parts = StoreParts(
        store.disk,
        store.index,
        store.staging,
        store.segments,
        store.ingest,
        Histories(store.disk, store.index),
    )
    settings = FaceSettings(2.0, 30.0, (), (os.geteuid(), os.getegid()))
    return Face(parts, settings, PlentyOfRoom(store.disk.space))


def test_an_open_log_is_synced_after_a_while_and_only_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        face = face_on(store)
        ino = face.mutations.create(ROOT_INO, b"train.log", 0o100644, 0, 0)
        await face.files.write(ino, 0, b"step 1\n")
        assert not face.namespace.inode(ino).content.synced
        assert await face.flusher.flush(0) == 0, "it is younger than that"
        assert await face.flusher.flush(time.time_ns() + 1) == 1
        assert face.namespace.inode(ino).content.synced
        assert await face.flusher.flush(time.time_ns() + 1) == 0

    # LMDB must be closed before Python collects what is left of it: it would crash the process.
    store = SmallStore(tmp_path)
    try:
        trio.run(scenario)
    finally:
        store.close()


def test_a_sync_while_a_file_is_being_stored_does_not_keep_it_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        face = face_on(store)
        ino = face.mutations.create(ROOT_INO, b"save", 0o100644, 0, 0)
        await face.files.write(ino, 0, b"saved" * 100_000)
        face.files.release(ino, write=True)
        waiting = Waiting(ino, b"save", face.namespace.inode(ino), 500_000)
        assert await face.flusher.flush(time.time_ns() + 1) == 1
        await face.storing.store([waiting])
        assert face.namespace.inode(ino).content.staging == 0

    # LMDB must be closed before Python collects what is left of it: it would crash the process.
    store = SmallStore(tmp_path)
    try:
        trio.run(scenario)
    finally:
        store.close()
