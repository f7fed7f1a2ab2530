"""daemon/hashing_processes.py: others cut and hash as it is done here, and one that dies costs nothing."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio
from kernelmounts import poll
from small_store import SmallStore, memory_or, random_bytes, safetensors

from ckptfs.daemon import hashing_worker
from ckptfs.daemon.hashing_processes import HashingProcesses
from ckptfs.daemon.hashing_worker import Worker
from ckptfs.daemon.idling import may_be_hurried
from ckptfs.store.bad_chunks import find_bad_places
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Unavailable
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Table
from ckptfs.store.ingest import Candidate, IngestReport
from ckptfs.store.places import Places
from ckptfs.store.regions import Mode, plan_regions
from ckptfs.store.segment_files import Bad
from ckptfs.store.segment_format import Location, segment_paths
from ckptfs.store.spans import LEAST_BYTES, SPAN_BYTES, Cuts, Span, cut_span, spans_of

SIZE = 3_000_000


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[HashingProcesses]:
    cutters = HashingProcesses(Disk(str(tmp_path)))
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
            if is_ours and b"hashing_process" in (entry / "cmdline").read_bytes():
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


async def cut_one(workers: HashingProcesses, fd: int, span: Span) -> Cuts:
    (cuts,) = await workers.cut(fd, [span])
    return cuts


def cuts_here(span: Span) -> tuple[int, list[int], bytes]:
    return seen(cut_span(memoryview(random_bytes(SIZE))[span.offset : span.limit], span))


def seen(cuts: Cuts) -> tuple[int, list[int], bytes]:
    return cuts.offset, list(cuts.lengths), cuts.ids


@pytest.mark.parametrize("mode", Mode)
def test_a_span_is_cut_as_here(workers: HashingProcesses, fd: int, mode: Mode) -> None:
    span = Span(4097, 2_000_001, SIZE, mode)
    assert seen(trio.run(cut_one, workers, fd, span)) == cuts_here(span)


def test_spans_that_follow_one_another_are_cut_in_one_go(workers: HashingProcesses, fd: int) -> None:
    ends = [4097, 70_000, 70_003, 900_000, SIZE]
    modes = [Mode.FIXED, Mode.CONTENT, Mode.FIXED, Mode.CONTENT, Mode.FIXED]
    spans = [Span(at, end, end, mode) for at, end, mode in zip([0, *ends], ends, modes, strict=False)]
    whole = [*spans[:3], Span(70_003, 500_000, 900_000, Mode.CONTENT)]
    for bunch in (spans, whole, spans[1:3]):
        assert [seen(one) for one in trio.run(workers.cut, fd, bunch)] == [cuts_here(one) for one in bunch]
    for pid in children():
        os.kill(pid, signal.SIGKILL)
    assert [seen(one) for one in trio.run(workers.cut, fd, spans)] == [cuts_here(one) for one in spans]


def test_several_spans_at_a_time(workers: HashingProcesses, fd: int) -> None:
    spans = spans_of(plan_regions(SIZE, None), 256 << 10)
    found: dict[int, object] = {}

    async def cut(number: int) -> None:
        found[number] = seen(await cut_one(workers, fd, spans[number]))

    async def cut_all() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(len(spans)):
                nursery.start_soon(cut, number)

    trio.run(cut_all)
    assert found == {number: cuts_here(span) for number, span in enumerate(spans)}
    assert len(children()) == 2


def test_a_worker_that_died_is_done_without(workers: HashingProcesses, fd: int) -> None:
    span = Span(0, SIZE, SIZE, Mode.CONTENT)
    for _ in range(3):
        assert seen(trio.run(cut_one, workers, fd, span)) == cuts_here(span)
        for pid in children():
            os.kill(pid, signal.SIGKILL)


def test_workers_that_cannot_be_started_are_done_without(
    tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    workers = HashingProcesses(Disk(str(tmp_path)))
    trio.run(workers.prepare)
    span = Span(0, SIZE, SIZE, Mode.FIXED)
    for _ in range(2):
        assert seen(trio.run(cut_one, workers, fd, span)) == cuts_here(span)
    workers.close()
    assert len([one for one in caplog.records if one.levelname == "ERROR"]) == 1


def test_workers_that_never_say_that_they_are_ready_are_done_without(
    tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(silent))
    monkeypatch.setattr(hashing_worker, "GIVEN_UP_AFTER_S", 0.05)
    workers = HashingProcesses(Disk(str(tmp_path)))
    trio.run(workers.prepare)
    span = Span(0, SIZE, SIZE, Mode.FIXED)
    assert seen(trio.run(cut_one, workers, fd, span)) == cuts_here(span)
    workers.close()


def test_nobody_waits_for_the_start_of_a_worker(tmp_path: Path, fd: int) -> None:
    workers, span = HashingProcesses(Disk(str(tmp_path))), Span(0, SIZE, SIZE, Mode.CONTENT)
    assert seen(trio.run(cut_one, workers, fd, span)) == cuts_here(span)
    workers.close()


def test_a_worker_that_nobody_heard_ends_without_a_word() -> None:
    """Its first message is never read, so the end of the other side is a reset for it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "ckptfs.daemon.hashing_process"]
    with theirs, subprocess.Popen(command, stdin=theirs.fileno(), stderr=subprocess.PIPE) as worker:
        assert select.select([ours], [], [], 20) == ([ours], [], [])
        ours.close()
        assert worker.communicate(timeout=20)[1] == b""
    assert worker.returncode == 0


CUTTING = """
import os, sys, time, trio
from ckptfs.daemon import hashing_worker
from ckptfs.daemon.hashing_processes import HashingProcesses
from ckptfs.store.disk import Disk
from ckptfs.store.regions import Mode
from ckptfs.store.spans import Span
workers = HashingProcesses(Disk("/"))
workers.width = 1
trio.run(workers.prepare)
trio.run(workers.cut, os.open(sys.argv[1], os.O_RDONLY), [Span(0, 1, 1, Mode.FIXED)])
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
    assert poll(lambda: not Path(f"/proc/{worker}").exists(), 60)


def test_a_file_that_became_shorter_is_unavailable(
    workers: HashingProcesses, fd: int, tmp_path: Path
) -> None:
    os.truncate(tmp_path / "file", SIZE - 1)
    with pytest.raises(Unavailable):
        trio.run(cut_one, workers, fd, Span(0, SIZE, SIZE, Mode.FIXED))
    os.truncate(tmp_path / "file", SIZE)


def test_a_span_that_is_given_up_answers_no_other(workers: HashingProcesses, fd: int) -> None:
    first, second = Span(0, 1 << 20, SIZE, Mode.FIXED), Span(1 << 20, 2 << 20, SIZE, Mode.FIXED)

    async def cut() -> Cuts:
        await cut_one(workers, fd, first)
        for worker in children():
            os.kill(worker, signal.SIGSTOP)
        with trio.move_on_after(0.05) as scope:
            await cut_one(workers, fd, first)
        assert scope.cancelled_caught
        for worker in children():
            os.kill(worker, signal.SIGCONT)
        return await cut_one(workers, fd, second)

    assert seen(trio.run(cut)) == cuts_here(second)


@pytest.mark.skipif(not may_be_hurried(), reason="who is idle could not be hurried here")
def test_workers_run_when_nothing_else_does_unless_somebody_waits(workers: HashingProcesses, fd: int) -> None:
    span = Span(0, SIZE, SIZE, Mode.FIXED)

    def policies() -> set[tuple[int, str]]:
        """Each with the niceness of its group, as other groups see it."""
        groups = {pid: Path(f"/proc/{pid}/autogroup") for pid in children()}
        return {
            (os.sched_getscheduler(pid), path.read_text().split()[-1] if path.exists() else "")
            for pid, path in groups.items()
        }

    own = Path("/proc/self/autogroup")
    idle, ours = ("19", own.read_text()) if own.exists() else ("", "")
    trio.run(cut_one, workers, fd, span)
    with workers.hurried():
        assert policies() == {(os.SCHED_OTHER, idle and "0")}
        trio.run(cut_one, workers, fd, span)
        assert policies() == {(os.SCHED_OTHER, idle and "0")}
    assert policies() == {(os.SCHED_IDLE, idle)}
    assert not ours or own.read_text() == ours, "not that of everybody here"


@pytest.mark.skipif(not may_be_hurried(), reason="who is idle could not be hurried here")
def test_what_nobody_waits_for_is_cut_by_idle_cores_alone(workers: HashingProcesses, fd: int) -> None:
    span = Span(0, SIZE, SIZE, Mode.CONTENT)
    with workers.hurried():
        assert trio.run(workers.cut_idly, fd, [span]) is None
    cuts = trio.run(workers.cut_idly, fd, [span])
    assert cuts is not None and [seen(one) for one in cuts] == [cuts_here(span)]
    assert os.SCHED_IDLE in {os.sched_getscheduler(pid) for pid in children()}
    workers.close()
    workers.width = 0
    assert trio.run(workers.cut_idly, fd, [span]) is None, "never in the daemon itself"


# -- hashing what is stored ---------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[SmallStore]:
    """Tensors, plain content and a hole, each more than a request is worth."""
    store = SmallStore(memory_or(tmp_path))
    store.store_bytes(safetensors({"a": random_bytes(3 << 20), "b": random_bytes(100_000, 2)}))
    store.store_bytes(random_bytes(3 << 20, 3))
    number = store.stage((0, random_bytes(1 << 20, 4)), (4 << 20, random_bytes(1 << 20, 5)), size=6 << 20)
    store.store(store.candidate(number))
    yield store
    store.close()
    shutil.rmtree(store.root)


@pytest.fixture
def lent(workers: HashingProcesses) -> Iterator[Worker]:
    with workers.lent() as worker:
        assert worker is not None
        yield worker


def places_in(store: SmallStore) -> Places:
    chunks = [ChunkId(chunk) for chunk, _ in store.index.scan(Table.CHUNK)]
    return store.segments.locate_many(chunks)


def flip_byte(store: SmallStore, location: Location) -> None:
    path = store.root / segment_paths(location.segment)[location.in_idx]
    with path.open("r+b") as file:
        file.seek(location.offset)
        byte = file.read(1)
        file.seek(location.offset)
        file.write(bytes([byte[0] ^ 1]))


def test_another_process_finds_what_is_wrong(stored: SmallStore, lent: Worker) -> None:
    places = places_in(stored)
    assert find_bad_places(stored.disk, places, lent) == []
    assert lent.is_waiting, "it was asked"
    wrong = [places.location(at) for at in (0, len(places) // 2, len(places) - 1)]
    for location in wrong:
        flip_byte(stored, location)
    found = find_bad_places(stored.disk, places, lent)
    assert found == find_bad_places(stored.disk, places)
    assert {one.location for one in found} == set(wrong)


def test_a_hole_that_is_not_asked_for_stays_one(stored: SmallStore, lent: Worker) -> None:
    """A tmpfs fills what is touched."""

    def blocks() -> int:
        return sum(path.stat().st_blocks for path in stored.root.glob("segments/*/*"))

    before = blocks()
    find_bad_places(stored.disk, places_in(stored), lent)
    assert blocks() == before


def test_a_segment_that_was_cut_off_costs_no_process(stored: SmallStore, lent: Worker) -> None:
    places = places_in(stored)
    last = max(map(places.location, range(len(places))), key=lambda one: (not one.in_idx, one.offset))
    os.truncate(stored.root / segment_paths(last.segment)[0], last.offset)
    found = find_bad_places(stored.disk, places, lent)
    assert last in {one.location for one in found}
    assert found == find_bad_places(stored.disk, places)
    assert len(children()) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_process_that_dies_while_it_hashes_is_done_without(
    stored: SmallStore, lent: Worker, number: int
) -> None:
    places = places_in(stored)
    flip_byte(stored, places.location(0))
    for pid in children():
        os.kill(pid, number)
    assert [one.location for one in find_bad_places(stored.disk, places, lent)] == [places.location(0)]


def test_one_that_is_not_waited_for_answers_nobody(workers: HashingProcesses, stored: SmallStore) -> None:
    """The thread that has it goes on without; the next request has another."""
    places = places_in(stored)
    ended: list[list[Bad]] = []

    def check_in(worker: Worker | None) -> None:
        ended.append(find_bad_places(stored.disk, places, worker))

    async def check() -> None:
        with workers.lent() as worker:
            await trio.to_thread.run_sync(check_in, worker, abandon_on_cancel=True)

    async def steps() -> None:
        for pid in children():
            os.kill(pid, signal.SIGSTOP)
        with trio.move_on_after(0.05) as scope:
            await check()
        assert scope.cancelled_caught
        with trio.fail_after(20):
            while not ended:
                await trio.sleep(0.01)
        for pid in children():
            os.kill(pid, signal.SIGCONT)
        await check()

    trio.run(steps)
    assert ended == [[], []]
    trio.run(workers.prepare)


def test_no_more_are_lent_than_there_are_cores(workers: HashingProcesses) -> None:
    """Whoever waits for a thread holds what it was lent; so the others do without."""
    with ExitStack() as stack:
        lent = [stack.enter_context(workers.lent()) for _ in range(5)]
        assert [one is not None for one in lent] == [True, True, False, False, False]
    assert len(children()) <= 2 + 2, "those that cut are others"


# -- through ingest -----------------------------------------------------------------------------


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[SmallStore, SmallStore]]:
    """A store whose large files are cut by workers, and one without."""
    with_workers, without = (SmallStore(memory_or(tmp_path)) for _ in range(2))
    cutters = HashingProcesses(with_workers.disk)
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


def test_a_file_of_many_tensors_becomes_the_same_content(stores: tuple[SmallStore, SmallStore]) -> None:
    """What lies between them is a few bytes, or so much that it is cut by its content."""
    named = {f"t{n}": random_bytes(n * 37_000 + 4 * n, n) for n in range(1, 45)}
    content = safetensors(named) + random_bytes(300_000)
    assert len(content) > LEAST_BYTES
    by_workers, here = (store.store_bytes(content) for store in stores)
    assert (by_workers.recipe, by_workers.root, by_workers.size) == (here.recipe, here.root, here.size)
    assert stores[0].read(by_workers) == content


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
