"""Node ids: what the kernel holds of an inode that got a second node, against a plain count per node."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ckptfs.fusefs.kept_state import KeptState
from ckptfs.fusefs.lookups import Lookups
from ckptfs.fusefs.node_ids import FIRST_VIRTUAL_INO, SECOND_NODE
from ckptfs.fusefs.nodes import Nodes
from ckptfs.fusefs.requests import Requests

INO = 4711
steps = st.lists(
    st.one_of(
        st.just(("remember", 0)),
        st.just(("split", 0)),
        st.tuples(st.sampled_from(["forget first", "forget second"]), st.integers(1, 3)),
    ),
    max_size=30,
)


@given(steps)
def test_nodes_are_counted_one_by_one(todo: list[tuple[str, int]]) -> None:
    state = KeptState.make()
    lookups = Lookups(state, Requests(state))
    nodes = Nodes(lookups, state.notes)
    held: Counter[int] = Counter()
    is_split = False
    for what, count in todo:
        node = {"forget first": INO, "forget second": INO | SECOND_NODE}.get(what)
        if what == "remember":
            nodes.remember(INO)
            held[nodes.node_of(INO)] += 1
        elif what == "split" and not is_split and held[INO]:
            nodes.split(INO)
            is_split = True
        elif node is not None and held[node] >= count:
            held[node] -= count
            gone = nodes.forget(node, count)
            assert gone == (held.total() == 0)
            is_split = is_split and not gone
        assert lookups.count(INO) == held.total()
        assert nodes.node_of(INO) == (INO | SECOND_NODE if is_split else INO)
        assert nodes.is_left(INO) == is_split
        assert not nodes.is_left(INO | SECOND_NODE)
    next_state = KeptState(state.fd)
    next_nodes = Nodes(Lookups(next_state, Requests(next_state)), next_state.notes)
    assert next_nodes.node_of(INO) == nodes.node_of(INO)
    state.close()


@given(st.integers(1, SECOND_NODE - 1))
def test_both_nodes_are_of_the_inode(ino: int) -> None:
    assert Nodes.ino_of(ino) == Nodes.ino_of(ino | SECOND_NODE) == ino


@given(st.integers(FIRST_VIRTUAL_INO, 2 * FIRST_VIRTUAL_INO - 1))
def test_nodes_of_versions_are_as_they_are(node: int) -> None:
    assert Nodes.ino_of(node) == node
