"""Which versions a merge is of, and who is told to be missing."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from ckptfs.daemon.merge_choice import Choice, choose, common_steps
from ckptfs.store.errors import InvalidRequest, NotFound
from ckptfs.store.history import GENESIS, State, VersionRecord
from ckptfs.store.history_scan import scan_history
from ckptfs.store.ids import ChunkId, TreeId, UnitId
from ckptfs.store.remote.catalogue import RemoteUnit
from ckptfs.store.remote.head import RemoteHead
from ckptfs.store.tree import Entry
from ckptfs.store.version_names import version_name

TOP = Entry(
    name=b"top", mode=0o40755, uid=0, gid=0, mtime_ns=1, ctime_ns=1, tree=TreeId(ChunkId(bytes(32)))
)  # fmt: skip
PARTIAL, COMPLETE = State.PARTIAL, State.COMPLETE


def unit(
    node: str,
    *versions: tuple[int | None, State] | tuple[int | None, State, tuple[int, ...]],
    identity: bytes | None = None,
    tags: dict[str, int] | None = None,
) -> RemoteUnit:
    """A unit of a node with versions of these steps, numbered from 1; the third part: steps held intact."""
    unit_id = UnitId((identity or node.encode()).ljust(16, b"."))
    records = tuple(
        VersionRecord(
            unit=unit_id, number=number, name=version_name(number, number), time_ns=number, origin="settled",
            top=TOP, root=bytes(32), files=1, logical_bytes=1, state=one[1], step=one[0],
            steps=one[2] if len(one) > 2 else (), missing=(), before=GENESIS,
        )
        for number, one in enumerate(versions, 1)
    )  # fmt: skip
    head = RemoteHead(
        unit=unit_id, sequence=1, name=b"run", node=node, generation=0, pieces=(), chain=GENESIS,
        versions=tuple(one.number for one in records),
    )  # fmt: skip
    return RemoteUnit(head, b"run", scan_history(b"", 0), records, tags or {})


def chosen(
    units: Sequence[RemoteUnit],
    version: str,
    nodes: Sequence[str] = (),
    prefer: Sequence[str] = (),
) -> list[tuple[str, int]]:
    return [(one.label, one.record.number) for one in choose(units, version, nodes, prefer).chosen]


def newest_of_all(*units: RemoteUnit) -> Choice:
    return choose(units, f"step:{common_steps(units, ())[0]}", (), ())


A = unit("a", (100, PARTIAL), (200, PARTIAL), (300, PARTIAL))
B = unit("b", (100, PARTIAL), (200, PARTIAL))
STEPLESS = unit("c", (None, PARTIAL), tags={"good": 1})
NOTHING = unit("d")


def test_the_newest_step_that_all_have() -> None:
    assert common_steps([A, B], ()) == [200, 100] and common_steps([A, B], ["a"]) == [300, 200, 100]
    choice = newest_of_all(B, A)
    assert [(one.label, one.record.number) for one in choice.chosen] == [("a", 2), ("b", 2)]
    assert (choice.step, choice.newer, choice.lacking, choice.preferred) == (200, (300,), (), 0)
    assert newest_of_all(A, B, NOTHING).lacking == (
        "d has no version of step 200 there (none was copied; with `partial = true` in its [[remote]] those "
        "with some ranks are, too)",
    )


def test_a_step_that_not_all_have() -> None:
    choice = choose([A, B], "step:300", (), ())
    assert [one.label for one in choice.chosen] == ["a"] and choice.step == 300
    assert choice.lacking == ("b has no version of step 300 there (steps 100, 200)",)
    assert choose([A, B], "step:300", ["a"], ()).lacking == ()
    with pytest.raises(NotFound, match=re.escape("of step 400; a: steps 100, 200, 300, b: steps 100, 200")):
        choose([A, B], "step:400", (), ())


def test_who_goes_first() -> None:
    other = unit("b", (200, PARTIAL), identity=b"other")
    assert chosen([A, B], "step:200", prefer=["b"]) == [("b", 2), ("a", 2)]
    assert choose([A, B], "step:200", (), ["b"]).preferred == 1
    hexed = other.head.unit.hex()
    assert chosen([A, B, other], "step:200", prefer=[hexed]) == [
        (f"b-{hexed[:8]}", 1), ("a", 2), (f"b-{B.head.unit.hex()[:8]}", 2),
    ]  # fmt: skip
    with pytest.raises(NotFound, match="'b' has no version of step 300"):
        choose([A, B], "step:300", (), ["b"])
    with pytest.raises(NotFound, match="not copied by 'x'; it was by a"):
        common_steps([A, B], ["x"])


def test_a_node_that_was_set_up_anew_is_one_node() -> None:
    old = unit("a", (50, COMPLETE), identity=b"old")
    choice = newest_of_all(old, A, B)
    assert (choice.step, choice.lacking, len(choice.chosen)) == (200, (), 2)


def test_which_version_of_a_step() -> None:
    """One that is whole before one that came later, with a part of the next save in it."""
    one = unit("a", (100, PARTIAL), (100, COMPLETE), (100, PARTIAL), (200, COMPLETE, (100, 200)))
    assert chosen([one], "step:100") == [("a", 2)]
    assert chosen([unit("a", (100, PARTIAL), (100, PARTIAL))], "step:100") == [("a", 2)]
    assert chosen([unit("a", (200, COMPLETE, (100, 200)))], "step:100") == [("a", 1)]
    with pytest.raises(NotFound):
        choose([unit("a", (200, PARTIAL, (100, 200)))], "step:100", (), ())


def test_versions_without_steps() -> None:
    with pytest.raises(
        InvalidRequest, match=r"no step that all nodes have.*c: its versions tell no step.*publish"
    ):
        common_steps([A, STEPLESS], ())
    tagged = unit("a", (100, PARTIAL), (200, PARTIAL), tags={"good": 2})
    choice = choose([tagged, STEPLESS, B], "good", (), ())
    assert [(one.label, one.record.number) for one in choice.chosen] == [("a", 2), ("c", 1)]
    assert choice.step == 200
    assert choice.lacking == ("b has no version of tag 'good' there (steps 100, 200)",)
    with pytest.raises(InvalidRequest, match="of several steps: 100, 200"):
        choose([tagged, unit("b", (100, PARTIAL), tags={"good": 1})], "good", (), ())


@pytest.mark.parametrize("version", ["3", "latest", "latest-complete", "time:2026-01-01T00:00", "step:1~5"])
def test_what_each_node_counts_for_itself_is_refused(version: str) -> None:
    with pytest.raises(InvalidRequest, match="each node counts its own versions"):
        choose([A, B], version, (), ())
