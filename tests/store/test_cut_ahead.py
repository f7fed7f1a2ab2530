"""store/cut_ahead.py: what is cut ahead is taken for the bytes that it was cut from, and for no others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from here_cutter import HereCutter
from small_store import SmallStore, memory_or, random_bytes, safetensors

from ckptfs.store import cut_ahead
from ckptfs.store.cut_ahead import Ahead, CutsAhead
from ckptfs.store.disk import Disk
from ckptfs.store.spans import LEAST_BYTES, SPAN_BYTES
from ckptfs.store.staging import staging_path

SIZE = LEAST_BYTES + SPAN_BYTES // 2
CONTENT = random_bytes(SIZE)
BUNCHES = [0, SPAN_BYTES, 2 * SPAN_BYTES]


class Here:
    """A store whose files are cut in this process, ahead or not."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.store = SmallStore(root, disk)
        self.cutter = HereCutter()
        self.cuts = CutsAhead(self.store.disk, self.store.segments, self.cutter)
        self.store.cut_with(self.cuts)

    def cut_ahead(self, number: int, ahead: Ahead, cancelled: Callable[[], bool] = lambda: False) -> None:
        candidate = self.store.candidate(number, cancelled=cancelled)
        trio.run(self.cuts.cut_ahead, candidate, ahead)

    def stored(self, number: int) -> bytes:
        """The content, once it is stored."""
        report = self.store.store(self.store.candidate(number))
        assert len(report.stored) == 1, report
        return self.store.read(report.stored[0])

    def path(self, number: int) -> Path:
        return self.store.root / staging_path(number)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    found = Here(memory_or(tmp_path))
    yield found
    found.store.close()
    shutil.rmtree(found.store.root)


def test_what_was_cut_ahead_is_not_cut_again(here: Here) -> None:
    ahead, number = Ahead(), here.store.stage((0, CONTENT))
    here.cut_ahead(number, ahead)
    assert (here.cutter.asked_idly, ahead.made, ahead.is_wasted) == (BUNCHES, 3, True)
    assert here.stored(number) == CONTENT
    assert [at for at in here.cutter.asked if at in BUNCHES] == []
    assert (ahead.taken, ahead.is_wasted) == (3, False)
    assert not here.cuts._known and not here.cuts._weight_bytes


def test_it_becomes_what_it_becomes_without(here: Here) -> None:
    for content in (CONTENT, safetensors({f"t{n}": random_bytes(4 << 20, n) for n in range(9)})):
        plain = here.store.store_bytes(content)
        here.store.reopen()
        number = here.store.stage((0, content))
        here.cut_ahead(number, Ahead())
        (again,) = here.store.store(here.store.candidate(number)).stored
        assert (again.recipe, again.root, again.size) == (plain.recipe, plain.root, plain.size)


def test_a_part_is_taken_and_the_rest_cut(here: Here) -> None:
    number, left = here.store.stage((0, CONTENT)), 2

    def cancelled() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    here.cut_ahead(number, Ahead(), cancelled)
    assert here.cutter.asked_idly == BUNCHES[:2]
    assert here.stored(number) == CONTENT
    assert BUNCHES[2] in here.cutter.asked and 0 not in here.cutter.asked


def test_a_file_that_was_changed_is_cut_anew(here: Here) -> None:
    """Whoever sets its times back cannot set back that of the change."""
    number = here.store.stage((0, CONTENT))
    before = here.path(number).stat()
    here.cut_ahead(number, Ahead())
    changed = b"changed" + CONTENT[7:]
    with here.path(number).open("r+b") as file:
        file.write(changed[:7])
    os.utime(here.path(number), ns=(before.st_atime_ns, before.st_mtime_ns))
    assert here.stored(number) == changed
    assert here.cutter.asked[0] == 0 and not here.cuts._known


def test_nothing_is_taken_once_it_is_over(here: Here) -> None:
    """Whatever the times say: a mapping may change bytes and none of them."""
    ahead, number = Ahead(), here.store.stage((0, CONTENT))
    here.cut_ahead(number, ahead)
    ahead.is_over = True
    assert here.stored(number) == CONTENT
    assert here.cutter.asked[0] == 0 and ahead.taken == 0
    assert not here.cuts._known and not here.cuts._weight_bytes


def test_what_changes_while_it_is_cut_is_not_known(here: Here) -> None:
    number = here.store.stage((0, CONTENT))
    ahead, other = Ahead(), Ahead()

    def change() -> None:
        with here.path(number).open("r+b") as file:
            file.write(b"changed")

    here.cutter.before = change
    here.cut_ahead(number, ahead)

    def end() -> None:
        other.is_over = True

    here.cutter.before = end
    here.cut_ahead(number, other)
    assert (ahead.made, other.made) == (0, 0)
    assert here.stored(number) == b"changed" + CONTENT[7:]


def test_a_file_that_somebody_writes_to_is_left_alone(here: Here) -> None:
    number, ahead = here.store.stage((0, CONTENT)), Ahead()
    with here.path(number).open("r+b"):
        here.cut_ahead(number, ahead)
    assert not ahead.made and not here.cutter.asked_idly


def test_other_spans_than_those_that_were_cut_are_cut(here: Here) -> None:
    number, ahead = here.store.stage((0, CONTENT)), Ahead()
    here.cut_ahead(number, ahead)
    (planned, _) = next(iter(here.cuts._known.values())).bunches[0]
    fd = os.open(here.path(number), os.O_RDONLY)
    try:
        for spans in (planned * 2, planned):  # taken out, and so gone
            trio.run(here.cuts.cut, fd, spans)
    finally:
        os.close(fd)
    assert here.cutter.asked == [0, 0] and ahead.taken == 0


def test_it_ends_where_cores_are_busy(here: Here) -> None:
    number, ahead = here.store.stage((0, CONTENT)), Ahead()
    here.cutter.is_busy = True
    here.cut_ahead(number, ahead)
    assert not ahead.made and not here.cutter.asked


def test_it_takes_no_more_memory_than_it_may(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_ahead, "MOST_BYTES", 1)
    first, second = Ahead(), Ahead()
    numbers = [here.store.stage((0, CONTENT)) for _ in range(2)]
    here.cut_ahead(numbers[0], first)
    here.cut_ahead(numbers[1], second)
    assert (first.made, second.made) == (1, 0)
    first.is_over = True
    here.cut_ahead(numbers[1], second)
    assert second.made == 1 and len(here.cuts._known) == 1


class ColdDisk(Disk):
    """A disk from which everything would have to be read first."""

    def is_in_memory(self, fd: int, size: int) -> bool:
        assert size == SIZE and super().is_in_memory(fd, size)
        return False


def test_what_would_have_to_be_read_from_the_disk_is_left_alone(tmp_path: Path) -> None:
    cold = Here(tmp_path, ColdDisk(str(tmp_path)))
    number, ahead = cold.store.stage((0, CONTENT)), Ahead()
    cold.cut_ahead(number, ahead)
    assert not ahead.made and not cold.cutter.asked_idly
    assert cold.stored(number) == CONTENT
    cold.store.close()
