"""The handlers of open, without a kernel: what must hold however long one of them has to wait."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pyfuse3
import pytest
import trio
from small_face import NoRoom, SmallFace, small_face
from small_store import random_bytes, safetensors

from ckptfs.fusefs import kernel, passthrough
from ckptfs.fusefs.kept_state import KeptState
from ckptfs.fusefs.kernel_caches import KernelCaches
from ckptfs.fusefs.nodes import SECOND_NODE
from ckptfs.store.inode import ROOT_INO

CONTENT = safetensors({"w": random_bytes(2 << 20)})
CTX = cast(pyfuse3.RequestContext, SimpleNamespace(uid=0, gid=0, pid=1, umask=0))


class OneWaits:
    """A disk without room for the first who asks, until `has_room`."""

    def __init__(self) -> None:
        self.has_room, self.is_waiting = trio.Event(), trio.Event()

    async def before_writing(self) -> None:
        if not self.is_waiting.is_set():
            self.is_waiting.set()
            await self.has_room.wait()


@pytest.fixture
def backing(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The backing ids that are open, of a kernel that is not there."""
    numbers, opened = itertools.count(1), set[int]()

    def open_backing(fuse_fd: int, fd: int) -> int:
        opened.add(number := next(numbers))
        return number

    async def drop_attributes(self: KernelCaches, node: int) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(passthrough, "REPLIES", SimpleNamespace(arm=lambda fh, flags, backing_id: None))
    monkeypatch.setattr(kernel, "open_backing", open_backing)
    monkeypatch.setattr(kernel, "close_backing", lambda fuse_fd, number: opened.remove(number))
    monkeypatch.setattr(KernelCaches, "drop_attributes", drop_attributes)
    return opened


async def looked_up(small: SmallFace) -> int:
    """The node that the name of the file leads to now."""
    entry = await small.face.operations.lookup(small.at("run"), b"m.safetensors", CTX)
    return entry.st_ino


async def refusal(small: SmallFace, node: int, flags: int) -> int | None:
    """The errno of an open."""
    try:
        await small.face.operations.open(node, flags, CTX)
    except pyfuse3.FUSEError as e:
        return e.errno
    return None


def with_saved_file(store: Path, work: Callable[[SmallFace], object]) -> None:
    with small_face(store) as small:
        other = safetensors({"w": random_bytes(2 << 20, 2)})
        small.make(ROOT_INO, {"run": {"m.safetensors": CONTENT, "other": other}})
        small.publish("run")
        small.face.passthrough.enable(0)
        for path in ("run/m.safetensors", "run/other"):
            recipe = small.face.namespace.inode(small.at(path)).content.base
            assert recipe is not None
            small.face.whole_segments.want(recipe)
        trio.run(small.face.whole_segments.execute)
        work(small)


def test_an_open_that_waits_while_another_writer_splits_the_inode_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backing: set[int]
) -> None:
    """The kernel would meet it with EIO, or write into the node of the readers."""

    async def main(small: SmallFace, waits: OneWaits) -> None:
        ops = small.face.operations
        node = await looked_up(small)
        reader = await ops.open(node, os.O_RDONLY, CTX)
        assert small.face.passthrough.reads_stored(node)
        refusals: list[int | None] = []

        async def first_writer() -> None:
            refusals.append(await refusal(small, node, os.O_RDWR))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first_writer)
            await waits.is_waiting.wait()
            assert await refusal(small, node, os.O_RDWR) == errno.ESTALE
            second = await looked_up(small)
            assert second == node | SECOND_NODE
            writer = await ops.open(second, os.O_RDWR, CTX)
            await ops.write(writer.fh, 0, b"changed")
            waits.has_room.set()
        assert refusals == [errno.ESTALE]
        await ops.release(writer.fh)
        await ops.release(reader.fh)
        assert not small.face.files.open_files and not backing

    def work(small: SmallFace) -> None:
        trio.run(main, small, waits)

    waits = OneWaits()
    monkeypatch.setattr(NoRoom, "before_writing", waits.before_writing)
    with_saved_file(tmp_path / "store", work)


def test_a_writer_whose_name_leads_to_another_file_meanwhile(tmp_path: Path, backing: set[int]) -> None:
    """The kernel looks the name up once after ESTALE. That must be enough, also if another file, which is
    read from its segment, was renamed into place just then."""

    async def main(small: SmallFace) -> None:
        ops, top = small.face.operations, small.at("run")
        other = small.at("run/other")
        readers = [await ops.open(node, os.O_RDONLY, CTX) for node in (await looked_up(small), other)]
        assert small.face.passthrough.stored_nodes == 2
        assert await refusal(small, small.at("run/m.safetensors"), os.O_RDWR) == errno.ESTALE
        await ops.rename(top, b"other", top, b"m.safetensors", 0, CTX)
        second = await looked_up(small)
        assert second == other | SECOND_NODE
        writer = await ops.open(second, os.O_RDWR, CTX)
        assert await looked_up(small) == second
        for info in (*readers, writer):
            await ops.release(info.fh)
        assert not small.face.files.open_files and not backing

    with_saved_file(tmp_path / "store", lambda small: trio.run(main, small))


def test_only_who_insists_opens_a_first_node(tmp_path: Path, backing: set[int]) -> None:
    """After ESTALE the kernel comes with the second node if there is a name that leads to it."""

    async def main(small: SmallFace) -> None:
        ops = small.face.operations
        node = await looked_up(small)
        reader = await ops.open(node, os.O_RDONLY, CTX)
        assert await refusal(small, node, os.O_RDWR) == errno.ESTALE
        writer = await ops.open(await looked_up(small), os.O_RDWR, CTX)
        await ops.write(writer.fh, 0, b"changed")
        for _ in range(3):
            assert await refusal(small, node, os.O_RDONLY) == errno.ESTALE, "older bytes are read there"
        await ops.release(reader.fh)
        assert not backing
        assert await refusal(small, node, os.O_RDONLY) == errno.ESTALE
        late = await ops.open(node, os.O_RDONLY, CTX)
        assert late.direct_io and await ops.read(late.fh, 0, 7) == b"changed"
        assert await refusal(small, node, os.O_RDWR) == errno.ESTALE
        for fh in (writer.fh, late.fh):
            await ops.release(fh)
        assert not small.face.files.open_files and not backing

    with_saved_file(tmp_path / "store", lambda small: trio.run(main, small))


def test_what_was_found_damaged_is_handed_out_no_more(tmp_path: Path, backing: set[int]) -> None:
    async def main(small: SmallFace) -> None:
        ops, segments = small.face.operations, small.face.whole_segments
        node = await looked_up(small)
        reader = await ops.open(node, os.O_RDONLY, CTX)
        assert await refusal(small, node, os.O_RDONLY) is None
        recipe = small.face.namespace.inode(node).content.base
        assert recipe is not None
        opened = segments.open(recipe, only_tensors=True)
        assert opened is not None
        os.close(opened.fd)
        small.parts.segments.suspect.add(opened.segment)
        assert segments.open(recipe, only_tensors=True) is None
        assert await refusal(small, node, os.O_RDONLY) == errno.ESTALE
        other = await ops.open(await looked_up(small), os.O_RDONLY, CTX)
        assert other.fh >> 1 == node | SECOND_NODE
        assert await ops.read(other.fh, 0, len(CONTENT)) == CONTENT, "read and verified by the daemon"
        for fh in (other.fh, reader.fh, reader.fh):
            await ops.release(fh)
        assert not small.face.files.open_files and not backing

    with_saved_file(tmp_path / "store", lambda small: trio.run(main, small))


def test_the_next_daemon_knows_what_was_found_damaged(tmp_path: Path) -> None:
    """Who has it open goes on by the kernel; whoever opens it anew must be refused."""

    def look(small: SmallFace) -> None:
        segments, state = small.parts.segments, small.face.state
        for number in (5, 6, 7):
            segments.suspect.add(number)
            segments.damaged.add(number)
        segments.suspect.discard(6)
        segments.damaged.discard(7)  # a copy of it was made
        for marked in (segments.suspect, segments.damaged):
            marked.clear()  # as in another process
        small.parts.index.commit()
        small.again(KeptState(state.fd))
        assert segments.suspect == {5, 7} and segments.damaged == {5, 6}

    with_saved_file(tmp_path / "store", look)
