"""Who wrote what a merge is of, out of what histories say of writers."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from saved_store import SavedStore

from ckptfs.daemon.merge_choice import Chosen
from ckptfs.daemon.merge_ranks import ranks_of, spans_text
from ckptfs.store.history import GENESIS, State, VersionRecord
from ckptfs.store.remote.catalogue import unit_of_history
from ckptfs.store.remote.head import RemoteHead
from ckptfs.store.writer_log import WriterLog
from ckptfs.store.writers import Writer, WritersRecord


def node(path: Path, *versions: tuple[int | None, list[dict[str, str]]]) -> Chosen:
    """The newest of some versions of a node, each of a step and written by processes with these ids."""
    store = SavedStore(path)
    log = WriterLog(store.disk, store.index, store.histories)
    record: VersionRecord | None = None
    for number, (step, writers) in enumerate(versions):

        def note(record: VersionRecord, writers: list[dict[str, str]] = writers) -> None:
            assert record.top.tree is not None
            rows = tuple(
                Writer(pid=at, uid=0, ids=tuple(sorted(ids.items()))) for at, ids in enumerate(writers)
            )
            log.record(record.unit, WritersRecord(record.number, record.top.tree, rows))

        store.before_listing = note
        content = {b"f": b"%d" % number}
        record = trio.run(lambda content=content, step=step: store.publish(b"run", content, step=step))
    assert record is not None
    unit = store.unit(b"run")
    head = RemoteHead(
        unit=unit.unit, sequence=1, name=b"run", node=path.name, generation=0, pieces=(), chain=GENESIS,
        versions=tuple(range(1, len(versions) + 1)),
    )  # fmt: skip
    found = unit_of_history(head, store.histories.history_bytes(unit))
    store.close()
    assert found.versions[-1] == record and record.state is State.COMPLETE
    return Chosen(path.name, found, record)


def rank(number: int | str, world: int | str = 4) -> dict[str, str]:
    return {"RANK": str(number), "WORLD_SIZE": str(world)}


def test_who_is_silent(tmp_path: Path) -> None:
    first = node(tmp_path / "a", (5, [rank(0), rank(1)]))
    second = node(tmp_path / "b", (5, [{"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, {"USER": "x"}]))
    found = ranks_of([first, second])
    assert found is not None
    assert (found.world, found.wrote, found.silent) == (4, {0, 1, 3}, (2,))
    alone = ranks_of([first])
    assert alone is not None and alone.silent == (2, 3)


def test_a_save_that_came_in_several_versions(tmp_path: Path) -> None:
    """What was written for an earlier step does not count."""
    one = node(tmp_path / "a", (4, [rank(3)]), (5, [rank(0)]), (5, [rank(1)]))
    found = ranks_of([one])
    assert found is not None and found.wrote == {0, 1}


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [{}],
        [rank(0, 1)],
        [rank("x")],
        [rank(0, "")],
        [rank(4, 4)],
        [rank("9" * 9, "9" * 10)],
        [rank("²")],
    ],
)
def test_nobody_told(tmp_path: Path, ids: list[dict[str, str]]) -> None:
    assert ranks_of([node(tmp_path / "a", (5, ids))]) is None


def test_spans() -> None:
    assert spans_text([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8" and spans_text([]) == ""


@given(st.sets(st.integers(0, 60)))
def test_spans_say_all(numbers: set[int]) -> None:
    said: list[int] = []
    for part in spans_text(sorted(numbers)).split(", ") if numbers else []:
        first, _, last = part.partition("-")
        said += range(int(first), int(last or first) + 1)
    assert said == sorted(numbers)
