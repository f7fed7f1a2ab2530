"""daemon/cut_workers.py: other processes cut files as they are cut here, and one that dies costs nothing."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from kernelmounts import poll
from small_store import SmallStore, memory_or, random_bytes, safetensors

from ckptfs.daemon.cut_workers import CutWorkers
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Unavailable
from ckptfs.store.ingest import Candidate, IngestReport
from ckptfs.store.regions import Mode, plan_regions
from ckptfs.store.spans import LEAST_BYTES, SPAN_BYTES, Cuts, Span, cut_span, spans_of

SIZE = 3_000_000


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[CutWorkers]:
    cutters = CutWorkers(Disk(str(tmp_path)))
    cutters.width = 2
    trio.run(cutters.prepare)
    assert len(children()) == 2
    yield cutters
    cutters.close()
    assert children() == set()


def children(parent: int | None = None) -> set[int]:
    """The processes that cut files of this process, or of another one."""
    wanted = f"PPid:\t{parent if parent is not None else os.getpid()}\n"
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = wanted in (entry / "status").read_text()
            if is_ours and b"cut_worker" in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(random_bytes(SIZE))
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def cuts_here(span: Span) -> tuple[int, list[int], bytes]:
    return seen(cut_span(memoryview(random_bytes(SIZE))[span.offset : span.limit], span))


def seen(cuts: Cuts) -> tuple[int, list[int], bytes]:
    return cuts.offset, list(cuts.lengths), cuts.ids


@pytest.mark.parametrize("mode", Mode)
def test_a_span_is_cut_as_here(workers: CutWorkers, fd: int, mode: Mode) -> None:
    span = Span(4097, 2_000_001, SIZE, mode)
    assert seen(trio.run(workers.cut, fd, span)) == cuts_here(span)


def test_several_spans_at_a_time(workers: CutWorkers, fd: int) -> None:
    spans = spans_of(plan_regions(SIZE, None), 256 << 10)
    found: dict[int, object] = {}

    async def cut(number: int) -> None:
        found[number] = seen(await workers.cut(fd, spans[number]))

    async def cut_all() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(len(spans)):
                nursery.start_soon(cut, number)

    trio.run(cut_all)
    assert found == {number: cuts_here(span) for number, span in enumerate(spans)}
    assert len(children()) == 2


def test_a_worker_that_died_is_done_without(workers: CutWorkers, fd: int) -> None:
    span = Span(0, SIZE, SIZE, Mode.CONTENT)
    for _ in range(3):
        assert seen(trio.run(workers.cut, fd, span)) == cuts_here(span)
        for pid in children():
            os.kill(pid, signal.SIGKILL)


def test_workers_that_cannot_be_started_are_done_without(
    tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    workers = CutWorkers(Disk(str(tmp_path)))
    trio.run(workers.prepare)
    span = Span(0, SIZE, SIZE, Mode.FIXED)
    for _ in range(2):
        assert seen(trio.run(workers.cut, fd, span)) == cuts_here(span)
    workers.close()
    assert len([one for one in caplog.records if one.levelname == "ERROR"]) == 1


def test_nobody_waits_for_the_start_of_a_worker(tmp_path: Path, fd: int) -> None:
    workers, span = CutWorkers(Disk(str(tmp_path))), Span(0, SIZE, SIZE, Mode.CONTENT)
    assert seen(trio.run(workers.cut, fd, span)) == cuts_here(span)
    workers.close()


def test_a_worker_that_nobody_heard_ends_without_a_word() -> None:
    """Its first message is never read, so the end of the other side is a reset for it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "ckptfs.daemon.cut_worker"]
    with theirs, subprocess.Popen(command, stdin=theirs.fileno(), stderr=subprocess.PIPE) as worker:
        assert select.select([ours], [], [], 20) == ([ours], [], [])
        ours.close()
        assert worker.communicate(timeout=20)[1] == b""
    assert worker.returncode == 0


CUTTING = """
import os, sys, time, trio
from ckptfs.daemon.cut_workers import CutWorkers
from ckptfs.store.disk import Disk
from ckptfs.store.regions import Mode
from ckptfs.store.spans import Span
workers = CutWorkers(Disk("/"))
workers.width = 1
trio.run(workers.prepare)
trio.run(workers.cut, os.open(sys.argv[1], os.O_RDONLY), Span(0, 1, 1, Mode.FIXED))
print("cut", flush=True)
sys.stdin.read()
"""


def test_workers_do_not_outlive_a_daemon_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    command = [sys.executable, "-c", CUTTING, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"cut\n"
        (worker,) = children(daemon.pid)
        daemon.kill()
    assert poll(lambda: not Path(f"/proc/{worker}").exists(), 20)


def test_a_file_that_became_shorter_is_unavailable(workers: CutWorkers, fd: int, tmp_path: Path) -> None:
    os.truncate(tmp_path / "file", SIZE - 1)
    with pytest.raises(Unavailable):
        trio.run(workers.cut, fd, Span(0, SIZE, SIZE, Mode.FIXED))
    os.truncate(tmp_path / "file", SIZE)


def test_a_span_that_is_given_up_answers_no_other(workers: CutWorkers, fd: int) -> None:
    first, second = Span(0, 1 << 20, SIZE, Mode.FIXED), Span(1 << 20, 2 << 20, SIZE, Mode.FIXED)

    async def cut() -> Cuts:
        await workers.cut(fd, first)
        for worker in children():
            os.kill(worker, signal.SIGSTOP)
        with trio.move_on_after(0.05) as scope:
            await workers.cut(fd, first)
        assert scope.cancelled_caught
        for worker in children():
            os.kill(worker, signal.SIGCONT)
        return await workers.cut(fd, second)

    assert seen(trio.run(cut)) == cuts_here(second)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take SCHED_IDLE back")
def test_workers_run_when_nothing_else_does_unless_somebody_waits(workers: CutWorkers, fd: int) -> None:
    span = Span(0, SIZE, SIZE, Mode.FIXED)

    def policies() -> set[int]:
        return {os.sched_getscheduler(pid) for pid in children()}

    trio.run(workers.cut, fd, span)
    with workers.hurried():
        assert policies() == {os.SCHED_OTHER}
        trio.run(workers.cut, fd, span)
        assert policies() == {os.SCHED_OTHER}
    assert policies() == {os.SCHED_IDLE}


# -- through ingest -----------------------------------------------------------------------------


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[SmallStore, SmallStore]]:
    """A store whose large files are cut by workers, and one without."""
    with_workers, without = (SmallStore(memory_or(tmp_path)) for _ in range(2))
    cutters = CutWorkers(with_workers.disk)
    cutters.width = 2
    trio.run(cutters.prepare)
    with_workers.cut_with(cutters)
    yield with_workers, without
    cutters.close()
    for store in (with_workers, without):
        store.close()
        shutil.rmtree(store.root)


@pytest.mark.parametrize("is_tensor", [True, False])
def test_a_large_file_becomes_the_same_content(
    stores: tuple[SmallStore, SmallStore], is_tensor: bool
) -> None:
    content = random_bytes(2 * SPAN_BYTES + 12_345)
    content += content[: SPAN_BYTES // 2]  # some of it twice
    if is_tensor:
        content = safetensors({"a": content[:-1], "b": content})
    by_workers, here = (store.store_bytes(content) for store in stores)
    assert (by_workers.recipe, by_workers.root, by_workers.size) == (here.recipe, here.root, here.size)
    assert stores[0].read(by_workers) == content
    assert stores[0].store_bytes(content).recipe == here.recipe  # all of it is known now


def test_a_writer_that_comes_while_a_file_is_cut_has_it(stores: tuple[SmallStore, SmallStore]) -> None:
    store = stores[0]
    content = random_bytes(LEAST_BYTES)
    store.store_bytes(content)
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        if asked == 1:  # before anything is read
            for pid in children():
                os.kill(pid, signal.SIGSTOP)
        return asked > 1

    number = store.stage((0, content[::-1]))
    report = store.store(store.candidate(number, cancelled=cancelled))
    assert report == IngestReport(cancelled=[number])
    for pid in children():  # one that had not begun
        os.kill(pid, signal.SIGCONT)
    assert store.store_bytes(content[::-1]).size == LEAST_BYTES


def test_a_large_file_with_holes_or_another_size_is_none_for_workers(
    stores: tuple[SmallStore, SmallStore],
) -> None:
    sparse = [
        store.store(store.candidate(store.stage((0, b"x"), size=2 * LEAST_BYTES))).stored[0]
        for store in stores
    ]
    assert sparse[0].recipe == sparse[1].recipe
    number = stores[0].stage((0, random_bytes(LEAST_BYTES)))
    other = Candidate(number, number, LEAST_BYTES + 1, "x", None, 0, None, lambda: False)
    assert stores[0].store(other).busy == [number]
