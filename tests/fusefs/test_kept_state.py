"""What outlives a daemon: at every step another one finds it as the first left it."""

from __future__ import annotations

import gc
import os
import struct
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.fusefs.browse_nodes import decode_node
from ckptfs.fusefs.kept_check import check_kept
from ckptfs.fusefs.kept_notes import Kind, Notes
from ckptfs.fusefs.kept_open import decode_open
from ckptfs.fusefs.kept_state import LAYOUT, Count, KeptState, Negotiated
from ckptfs.fusefs.kept_words import Words
from ckptfs.fusefs.node_ids import FIRST_VIRTUAL_INO, SECOND_NODE
from ckptfs.store.errors import Corrupt, Unsupported

NUMBERS = st.one_of(st.integers(0, 1100), st.integers(0, (1 << 53) - 1))
WORDS = st.one_of(st.just(0), st.integers(0, (1 << 64) - 1))
KINDS = st.sampled_from(list(Kind))
KEYS = st.one_of(st.integers(0, 3), st.integers(0, (1 << 64) - 1))
VALUES = st.one_of(st.none(), st.binary(max_size=40), st.integers(0, 90_000).map(bytes))
START = 5 << 56


@pytest.fixture
def state() -> Iterator[KeptState]:
    one = KeptState.make()
    yield one
    one.close()


def sparse_file() -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 1 << 62)
    return fd


@given(st.lists(st.tuples(NUMBERS, WORDS), max_size=60))
def test_words_are_those_of_a_dictionary(steps: list[tuple[int, int]]) -> None:
    fd = sparse_file()
    try:
        words, expected = Words(fd, START), dict[int, int]()
        for at, word in steps:
            words[at] = word
            expected[at] = word
            assert words[at] == word
        for one in (words, Words(fd, START)):
            assert dict(one.items()) == {at: word for at, word in expected.items() if word}
            assert {at: one[at] for at in expected} == expected
        for at in expected:
            words[at] = 0
        assert os.fstat(fd).st_blocks == 0, "what is zero takes no memory"
    finally:
        os.close(fd)


@given(st.lists(st.tuples(KINDS, KEYS, VALUES), max_size=60))
def test_notes_are_those_of_a_dictionary(steps: list[tuple[Kind, int, bytes | None]]) -> None:
    fd = sparse_file()
    try:
        notes, expected = Notes(fd, START), dict[tuple[Kind, int], bytes]()
        for kind, key, value in steps:
            if value is None:
                notes.delete(kind, key)
                expected.pop((kind, key), None)
            else:
                notes.put(kind, key, value)
                expected[kind, key] = value
            assert notes.get(kind, key) == value
        for one in (notes, Notes(fd, START)):
            assert {(kind, key): v for kind in Kind for key, v in one.items(kind)} == expected
    finally:
        os.close(fd)


def test_notes_that_are_replaced_for_ever_take_little_memory() -> None:
    fd = sparse_file()
    try:
        notes = Notes(fd, START)
        for number in range(100_000):
            notes.put(Kind.HANDLE, number % 7, bytes(8))
        assert os.fstat(fd).st_blocks * 512 < 1 << 20
        assert len([*Notes(fd, START).items(Kind.HANDLE)]) == 7
    finally:
        os.close(fd)


def test_a_note_of_an_unknown_kind_is_refused() -> None:
    fd = sparse_file()
    try:
        os.pwrite(fd, struct.pack("<Q", 13), START)
        os.pwrite(fd, struct.pack("<BQi", 250, 0, 0), START + 4096)
        with pytest.raises(Corrupt):
            Notes(fd, START)
    finally:
        os.close(fd)


@given(st.integers(0, (1 << 64) - 1), st.binary(max_size=60))
def test_any_bytes_are_a_state_or_refused(end: int, notes: bytes) -> None:
    """Nothing but Corrupt comes of it."""
    state = KeptState.make()
    state.negotiated = Negotiated("/mnt", "/store", 41, b"request", b"answer", True, True)
    os.pwrite(state.fd, struct.pack("<Q", end), 4 << 56)
    os.pwrite(state.fd, notes, (4 << 56) + 4096)
    try:
        check_kept(KeptState.adopt(state.fd))
    except Corrupt:
        pass
    finally:
        state.close()


@given(st.sampled_from([decode_node, decode_open]), st.binary(max_size=60))
def test_any_bytes_are_a_note_or_refused(decode: Callable[[bytes], object], encoded: bytes) -> None:
    try:
        decode(encoded)
    except Corrupt:
        pass


@pytest.mark.parametrize("counts", [1 << 17, 1 << 63])
def test_too_many_counts_are_refused(state: KeptState, counts: int) -> None:
    state.negotiated = Negotiated("/mnt", "/store", 41, b"request", b"answer", True, True)
    os.pwrite(state.fd, struct.pack("<Q", counts), 5 << 56)
    with pytest.raises(Corrupt):
        KeptState.adopt(state.fd)


def test_a_state_that_was_cut_is_refused(state: KeptState) -> None:
    state.negotiated = Negotiated("/mnt", "/store", 41, b"request", b"answer", True, True)
    os.ftruncate(state.fd, 1 << 20)
    with pytest.raises(Corrupt):
        KeptState.adopt(state.fd)


@given(st.lists(st.tuples(st.integers(0, 200), st.booleans()), max_size=40))
def test_what_the_kernel_wrote_by_itself_is_remembered(steps: list[tuple[int, bool]]) -> None:
    state, expected = KeptState.make(), dict[int, bool]()
    for ino, written in steps:
        state.set_written_behind(ino, written=written)
        expected[ino] = written
    for one in (state, KeptState(state.fd)):
        assert {ino: one.is_written_behind(ino) for ino in expected} == expected
    state.close()


def test_who_holds_an_inode(state: KeptState) -> None:
    state.set_count(Kind.HELD, 7, 2)
    state.set_count(Kind.HELD, 8 | SECOND_NODE, 1)
    state.set_count(Kind.HANDLE, 9 << 1 | 1, 1)
    state.set_count(Kind.HANDLE, (10 | SECOND_NODE) << 1, 1)
    state.set_count(Kind.HELD, FIRST_VIRTUAL_INO | 11, 1)
    for one in (state, KeptState(state.fd)):
        assert [ino for ino in range(20) if one.is_held(ino)] == [7, 8, 9, 10]
        assert one.count(Kind.HELD, FIRST_VIRTUAL_INO | 11) == 1
        assert one.is_open(9) and not one.is_open(10) and one.is_open(10 | SECOND_NODE)
    for key in (9 << 1 | 1, (10 | SECOND_NODE) << 1):
        state.set_count(Kind.HANDLE, key, 0)
    assert not state.is_held(9) and not state.is_held(10)


def test_counts_that_are_not_answered_yet(state: KeptState) -> None:
    counts = [Count(3, Kind.HELD, 7, 0), Count(3, Kind.HANDLE, 14, 0), Count(5, Kind.HELD, 8, 1)]
    for count in counts:
        state.counted.add(count)
    assert [*KeptState(state.fd).counted] == counts
    state.counted.void(3, Kind.HELD)
    assert [count.unique for count in KeptState(state.fd).counted] == [0, 3, 5]
    state.counted.drop_last()
    assert len([*state.counted]) == 2
    state.counted.clear()
    assert [*KeptState(state.fd).counted] == []


def test_another_layout_is_refused(state: KeptState) -> None:
    negotiated = Negotiated("/mnt", "/store", 41, b"request", b"answer", True, True)
    with pytest.raises(Corrupt):
        KeptState.adopt(state.fd)
    state.negotiated = negotiated
    assert KeptState.adopt(state.fd).negotiated == negotiated
    for foreign in (0, LAYOUT + 1):
        os.pwrite(state.fd, struct.pack("<H", foreign), 4)
        with pytest.raises(Unsupported, match=f"layout {foreign}"):
            KeptState.adopt(state.fd)
    os.pwrite(state.fd, struct.pack("<H", LAYOUT), 4)
    os.pwrite(state.fd, b"\xc1", 12)
    with pytest.raises(Corrupt):
        _ = KeptState.adopt(state.fd).negotiated


def test_the_layout_before_is_gone_on_with_and_then_is_ours(state: KeptState) -> None:
    """Whoever knows only that one must not go on with notes of kinds that came later."""
    state.negotiated = Negotiated("/mnt", "/store", 41, b"request", b"answer", True, True)
    state.notes.put(Kind.HANDLE, 5, bytes(8))
    os.pwrite(state.fd, struct.pack("<H", 1), 4)
    adopted = KeptState.adopt(state.fd)
    check_kept(adopted)
    assert adopted.negotiated == state.negotiated and adopted.notes.get(Kind.HANDLE, 5) == bytes(8)
    assert struct.unpack("<H", os.pread(state.fd, 2, 4)) == (LAYOUT,)


def test_a_new_kind_of_note_is_a_new_layout() -> None:
    assert (LAYOUT, [kind.value for kind in Kind]) == (2, [*range(1, 14)])


def test_what_nobody_has_any_more_is_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        KeptState.make()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
