"""fusefs/cutting_ahead.py: a closed file is cut before a version is made, unless it is changed again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from here_cutter import HereCutter
from small_face import SmallFace, small_face
from small_store import random_bytes

from ckptfs.fusefs import cutting_ahead
from ckptfs.fusefs.recording import Request
from ckptfs.store import cut_ahead
from ckptfs.store.inode import ROOT_INO
from ckptfs.store.spans import LEAST_BYTES, SPAN_BYTES

CONTENT = random_bytes(LEAST_BYTES)
OTHER = CONTENT[::-1]
BUNCHES = [0, SPAN_BYTES]


class Saving:
    """A face whose files are cut here, and the directory `run` in it."""

    def __init__(self, face: SmallFace) -> None:
        self.small = face
        self.face = face.face
        self.cutter = HereCutter()
        face.parts.cuts_ahead._cutter = self.cutter
        face.make(ROOT_INO, {"run": {}})
        self.run = face.at("run")

    def do(self, steps: Callable[[], Awaitable[None]]) -> None:
        """While files are cut ahead."""

        async def with_task() -> None:
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.face.cutting_ahead.run)
                    await trio.testing.wait_all_tasks_blocked()
                    await steps()
                    nursery.cancel_scope.cancel()

        trio.run(with_task)

    async def write(self, name: str, content: bytes) -> None:
        await self.small.write(self.run, name, content)

    async def until_cut(self, times: int) -> None:
        """Until so many bunches were cut ahead, and whoever cut them waits for something."""
        while len(self.cutter.asked_idly) < times:
            await trio.sleep(0.01)
        await trio.testing.wait_all_tasks_blocked(0.05)

    async def publish(self) -> None:
        await self.face.publisher.publish_now(self.run, Request("command"))

    def cut_at_publish(self) -> list[int]:
        """The bunches that were still to be cut then."""
        return [at for at in self.cutter.asked if at in BUNCHES]


@pytest.fixture
def saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Saving]:
    monkeypatch.setattr(cutting_ahead, "AFTER_CLOSE_S", 0.01)
    with small_face(tmp_path / "store") as face:
        yield Saving(face)


def test_a_closed_file_is_cut_before_its_version_is_made(saving: Saving) -> None:
    async def steps() -> None:
        await saving.write("small", b"x" * 1_000_000)
        await saving.write("a", CONTENT)
        await saving.until_cut(2)
        await saving.publish()

    saving.do(steps)
    assert saving.cutter.asked_idly == BUNCHES and saving.cut_at_publish() == []
    assert saving.small.tree(saving.run)["a"] == CONTENT


def test_without_the_task_a_file_is_cut_when_its_version_is_made(saving: Saving) -> None:
    async def steps() -> None:
        await saving.write("a", CONTENT)
        await saving.publish()

    trio.run(steps)
    assert saving.cutter.asked_idly == [] and saving.cut_at_publish() == BUNCHES
    assert not saving.face.cutting_ahead._files


@pytest.mark.parametrize("is_anew", [True, False])
def test_a_file_that_is_written_again_is_cut_as_it_is_then(saving: Saving, is_anew: bool) -> None:
    async def steps() -> None:
        await saving.write("a", CONTENT)
        await saving.until_cut(2)
        files, ino = saving.face.files, saving.small.at("run/a")
        await files.open(ino, write=True, truncate=is_anew)
        await files.write(ino, 0, OTHER)
        files.release(ino, write=True)
        await saving.publish()

    saving.do(steps)
    before = BUNCHES if is_anew else []  # a pre-image of what was there
    assert saving.cut_at_publish() == before + BUNCHES
    assert saving.small.tree(saving.run)["a"] == OTHER


def test_a_change_that_no_time_tells_of_is_known_by_its_close(
    saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tmpfs whoever reads through a writable mapping first moves no time when he writes then."""
    monkeypatch.setattr(cut_ahead, "_stamp_of", lambda found: (found.st_size, 0, 0))

    async def steps() -> None:
        await saving.write("a", CONTENT)
        await saving.until_cut(2)
        files, ino = saving.face.files, saving.small.at("run/a")
        await files.open(ino, write=True, truncate=False)
        await files.write(ino, 0, OTHER)
        files.release(ino, write=True)
        await saving.publish()

    saving.do(steps)
    assert saving.cut_at_publish() == BUNCHES


def test_a_file_that_was_cut_in_vain_is_not_cut_ahead_again(saving: Saving) -> None:
    async def steps() -> None:
        await saving.write("a", CONTENT)
        await saving.until_cut(2)
        for _ in range(3):
            await saving.write("a", OTHER)
        await saving.write("b", CONTENT)
        await saving.until_cut(4)
        await saving.publish()

    saving.do(steps)
    assert saving.cutter.asked_idly == 2 * BUNCHES
    assert saving.small.tree(saving.run) == {"a": OTHER, "b": CONTENT}


def test_a_file_whose_versions_were_made_of_it_is_cut_ahead_each_time(saving: Saving) -> None:
    async def steps() -> None:
        for number, content in enumerate([CONTENT, OTHER, CONTENT], 1):
            await saving.write("a", content)
            await saving.until_cut(2 * number)
            await saving.publish()

    saving.do(steps)
    assert saving.cutter.asked_idly == 3 * BUNCHES and saving.cut_at_publish() == []


def test_what_is_stored_is_not_kept_in_mind(saving: Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no file would be cut ahead any more after so many."""
    monkeypatch.setattr(cutting_ahead, "_MOST_FILES", 2)

    async def steps() -> None:
        for number in range(1, 5):
            await saving.write(f"a{number}", CONTENT[number:] + bytes(number))
            await saving.until_cut(2 * number)
            await saving.publish()

    saving.do(steps)
    assert saving.cutter.asked_idly == 4 * BUNCHES and saving.cut_at_publish() == []
    assert len(saving.face.cutting_ahead._files) <= 2


def test_nothing_is_cut_ahead_of_a_file_that_is_open_for_writing_or_gone(saving: Saving) -> None:
    async def steps() -> None:
        files = saving.face.files
        await saving.write("a", CONTENT)
        await files.open(saving.small.at("run/a"), write=True, truncate=False)
        await saving.write("b", CONTENT)
        saving.small.remove(saving.run, "b")
        await saving.write("c", CONTENT)
        await saving.until_cut(2)
        files.release(saving.small.at("run/a"), write=True)

    saving.do(steps)
    assert saving.cutter.asked_idly == BUNCHES, "of c alone"


def test_a_version_that_is_being_made_goes_first(saving: Saving) -> None:
    """What it finds is taken, and the rest is left to it."""

    async def publish(began: trio.Event) -> None:
        began.set()
        await saving.publish()

    async def steps() -> None:
        began = trio.Event()
        async with trio.open_nursery() as nursery:

            def publish_soon() -> None:
                saving.cutter.before = lambda: None
                nursery.start_soon(publish, began)

            saving.cutter.before = publish_soon
            await saving.write("a", CONTENT)
            await began.wait()

    saving.do(steps)
    assert saving.cutter.asked_idly == [0]
    assert saving.small.tree(saving.run)["a"] == CONTENT
