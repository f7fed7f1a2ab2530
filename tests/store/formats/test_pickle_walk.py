"""The pickle walk: agrees with pickle on what is plain, and survives what is hostile."""

from __future__ import annotations

import collections
import pickle
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.formats.pickle_values import Global, Made, Opaque, Pairs, Unwalkable
from ckptfs.store.formats.pickle_walk import StepBudget, Walker
from ckptfs.store.formats.torch_objects import name_storages

scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**61), 2**61), st.text(max_size=4))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
    ),
    max_leaves=20,
)


def walk(pickled: bytes, steps: int = 2_000_000) -> object:
    return Walker(pickled, StepBudget(steps)).next()


def plain(value: object) -> object:
    if isinstance(value, Pairs):
        return {key: plain(inner) for key, inner in value}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return tuple(plain(inner) for inner in value) if isinstance(value, tuple) else value


@given(values, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_what_pickle_says(value: object, protocol: int) -> None:
    assert plain(walk(pickle.dumps(value, protocol))) == value


def test_objects_are_remembered_not_made() -> None:
    made = walk(pickle.dumps([range(3), collections.OrderedDict(a=1), b"bytes", 2**80, 1.5]))
    assert isinstance(made, list)
    assert made[0] == Made(Global("builtins", "range"), (0, 3, 1))
    assert made[1] == Pairs([("a", 1)])
    assert made[2:] == [Opaque.VALUE] * 3


def test_nothing_is_called(tmp_path: Any) -> None:
    target = tmp_path / "made-by-a-pickle"
    command = f"cos\nsystem\n(X{struct.pack('<I', 6 + len(str(target))).decode('latin-1')}touch {target}tR."
    made = walk(command.encode("latin-1"))
    assert isinstance(made, Made) and made.called == Global("os", "system")
    assert not target.exists()


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b".",
        b"\x80\x02",
        b"(" * 100_000,
        b"\x8e" + struct.pack("<Q", 2**60) + b"x.",
        b"\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
        b"\x8b" + struct.pack("<i", -5) + b"x.",
        b"I" + b"9" * 100_000 + b"\n.",
        b"h\x07.",
        b"r\xff\xff\xff\xff.",
        b"\x82\x01.",
        b"\x97.",
        b"tttt.",
        b"]a.",
        b"}(K\x01u.",
        b"\x8c\x02\xff\xff.",
        b"cos\nsystem",
        b"Nb.",
        b"N\x86.",
        b"NNe.",
        b"K\x01(K\x02e.",
        b"N" + b"\x93.",
    ],
)
def test_broken_pickles_are_unwalkable(pickled: bytes) -> None:
    with pytest.raises(Unwalkable):
        walk(pickled)


def test_huge_numbers_are_opaque() -> None:
    assert walk(b"\x8b" + struct.pack("<i", 8_000_000) + b"\x7f" * 8_000_000 + b".") is Opaque.VALUE


def test_exponential_trees_stay_small() -> None:
    """Each tuple holds the one before twice: as a tree it has 2**3000 leaves."""
    doubled = b")" + b"2\x86" * 3000 + b"."
    assert name_storages(walk(doubled)) == {}
    as_key = b"}" + doubled[:-1] + b"Ns."
    assert name_storages(walk(as_key)) == {}
    # One long list as the argument of many calls.
    shared = b"ctorch\nSize\nq\x010](" + b"N" * 100_000 + b"eq\x020" + b"h\x01h\x02\x85R" * 30_000 + b"."
    assert name_storages(walk(shared)) == {}


def test_deep_nesting_and_cycles_end() -> None:
    assert name_storages(walk(b"]" * 150_000 + b"a" * 149_999 + b".")) == {}
    assert name_storages(walk(b"]q\x01h\x01a.")) == {}


def test_more_steps_than_the_limit() -> None:
    assert walk(b"]" * 1000 + b".", 1000) == []
    with pytest.raises(Unwalkable):
        walk(b"]" * 1001 + b".", 1000)


def test_the_budget_is_shared_by_a_file() -> None:
    budget = StepBudget(10)
    walker = Walker(b"N." * 100, budget)
    with pytest.raises(Unwalkable):
        for _ in range(100):
            walker.next()
    assert budget.left <= 0


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_unwalkable(pickled: bytes) -> None:
    try:
        name_storages(walk(pickled))
    except Unwalkable:
        pass
