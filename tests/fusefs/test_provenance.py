"""Noting writers: once for each process, without holding anybody up, and what a version takes of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import trio

from ckptfs.fusefs import provenance as module
from ckptfs.fusefs.process_reader import leader_of, read_writer, start_of
from ckptfs.fusefs.provenance import Provenance, writers_record
from ckptfs.store.ids import ChunkId, TreeId
from ckptfs.store.writers import MOST_WRITERS, Writer

DIRECTORY, OTHER = 10, 20
TREE = TreeId(ChunkId(bytes(32)))


@dataclass(frozen=True)
class By:
    pid: int
    uid: int = 1000


class World:
    """Inode numbers below 100 lie in DIRECTORY, others in OTHER; `written` are those that are open."""

    def __init__(self, read: Callable[[int, int], Writer] | None = None, *, is_on: bool = True) -> None:
        self.reads: list[int] = []
        self.written: set[int] = set()
        self._answer = read or (lambda pid, uid: Writer(pid=pid, uid=uid, program="read"))
        self.provenance = Provenance(
            self.written.__contains__,
            lambda ino: [DIRECTORY if ino < 100 else OTHER],
            is_on=is_on,
            read=self._read,
        )

    def _read(self, pid: int, uid: int) -> Writer:
        self.reads.append(pid)
        return self._answer(pid, uid)

    async def write(self, ino: int, by: By) -> None:
        self.provenance.opened(ino, await self.provenance.met(by))
        self.provenance.released(ino)

    def noted(self, *directories: int, open_: tuple[int, ...] = ()) -> list[Writer]:
        return list(writers_record(1, TREE, self.provenance.noted(directories, open_)).writers)

    def run(self, steps: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.provenance.run)
                await steps()
                nursery.cancel_scope.cancel()

        trio.run(main)


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is there until it is ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_process_is_read_once() -> None:
    world = World()

    async def steps() -> None:
        for ino in range(50):
            await world.write(ino, By(os.getpid()))
        assert world.noted(DIRECTORY) == [Writer(pid=os.getpid(), uid=1000, program="read")]

    world.run(steps)
    assert world.reads == [os.getpid()]


def test_threads_are_their_process() -> None:
    world, ready, end = World(), threading.Barrier(4), threading.Event()
    ids: list[int] = []

    def work() -> None:
        ids.append(threading.get_native_id())
        ready.wait()
        end.wait()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    ready.wait()

    async def steps() -> None:
        for number, thread in enumerate(ids):
            await world.write(number, By(thread))

    try:
        world.run(steps)
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert world.reads == [os.getpid()] and len(world.noted(DIRECTORY)) == 1
    assert set(ids).isdisjoint({os.getpid()})


def test_an_id_that_is_used_again_is_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    begun = iter([1, 1, 1, 2, 2])
    monkeypatch.setattr(module, "start_of", lambda thread: next(begun))
    monkeypatch.setattr(module, "_TRUSTED_S", 0.0)

    async def steps() -> None:
        for ino in range(3):
            await world.write(ino, By(os.getpid()))

    world.run(steps)
    assert world.reads == [os.getpid()] * 2


def test_whoever_cannot_be_seen_is_nobody() -> None:
    world = World()

    async def steps() -> None:
        assert await world.provenance.met(By(0)) is None
        with sleeper() as process:
            gone = process.pid
        assert await world.provenance.met(By(gone)) is None

    world.run(steps)
    assert not world.reads


def test_nothing_is_looked_at_where_it_is_off() -> None:
    world = World(is_on=False)

    async def steps() -> None:
        await world.write(1, By(os.getpid()))

    world.run(steps)
    assert not world.reads and not world.noted(DIRECTORY) and not world.provenance.directories()


def test_a_proc_that_hangs_holds_nobody_up_for_long() -> None:
    """Every thread hangs: each process is answered, the first after its patience, the others at once."""
    end = threading.Event()

    def hang(pid: int, uid: int) -> Writer:
        end.wait()
        return Writer(pid=pid, uid=uid, program="late")

    world = World(hang)

    async def steps() -> None:
        with sleeper() as one, sleeper() as two:
            with trio.fail_after(30):
                await world.write(1, By(one.pid))
            with trio.move_on_after(0) as at_once:
                await world.write(2, By(two.pid))
            assert not at_once.cancelled_caught, "who comes then does not wait at all"
            assert world.noted(DIRECTORY) == [Writer(pid=p.pid, uid=1000) for p in (one, two)]
            end.set()
            with trio.fail_after(30):
                while {w.program for w in world.noted(DIRECTORY)} != {"late"}:
                    await trio.sleep(0.01)

    world.run(steps)


def test_a_mount_ends_while_a_thread_hangs() -> None:
    end = threading.Event()

    def hang(pid: int, uid: int) -> Writer:
        end.wait()
        return Writer(pid=pid, uid=uid)

    world = World(hang)
    try:
        world.run(lambda: world.write(1, By(os.getpid())))
    finally:
        end.set()


def test_what_a_version_takes() -> None:
    world = World()

    async def steps() -> None:
        mine = By(os.getpid())
        with sleeper() as process:
            theirs = By(process.pid)
            await world.write(1, mine)
            await world.write(100, theirs)
            world.written.add(2)
            world.provenance.opened(2, await world.provenance.met(theirs))
            world.provenance.released(2)
            assert [w.pid for w in world.noted(DIRECTORY)] == [mine.pid], "it is still being written"
            assert [w.pid for w in world.noted(DIRECTORY, open_=(2,))] == [mine.pid, theirs.pid]
            assert [w.pid for w in world.noted(DIRECTORY, OTHER)] == [mine.pid, theirs.pid]
            world.provenance.published(DIRECTORY)
            assert world.noted(DIRECTORY) == []
            world.written.discard(2)
            world.provenance.released(2)
            assert [w.pid for w in world.noted(DIRECTORY)] == [theirs.pid]

    world.run(steps)


def test_a_record_takes_so_many() -> None:
    processes = {module.Process(Writer(pid=pid, uid=0)): None for pid in range(1, MOST_WRITERS + 8)}
    record = writers_record(3, TREE, processes)
    assert len(record.writers) == MOST_WRITERS and record.others == 7 and record.number == 3


def test_this_process_as_it_is() -> None:
    found = read_writer(os.getpid(), os.geteuid())
    assert found.pid == os.getpid() and found.program == os.path.basename(os.path.realpath(sys.executable))
    assert found.cgroup.startswith("/")
    assert leader_of(threading.get_native_id()) == os.getpid()
    assert start_of(os.getpid()) == start_of(os.getpid()) is not None
