"""The CPU's Hasher, which defines the answer: exactly the bad extents, whatever lies where."""

from __future__ import annotations

import ctypes
import random

import pytest
from awscrt import checksums
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.gpu.cpu_hasher import CpuHasher, address_of
from ckptfs.gpu.extent_table import ExtentTable
from ckptfs.gpu.extents import Extent, Hasher
from ckptfs.store.ids import ChunkId

LENGTHS = (0, 1, 63, 64, 65, 1023, 1024, 1025, 4096, 262_143, 262_144, 262_145)


def extents(memory: bytearray, ranges: list[tuple[int, int]], wrong: set[int]) -> list[Extent]:
    """One for each (offset, length); those of `wrong` expect another digest."""
    base = address_of(memoryview(memory))
    made = []
    for index, (at, length) in enumerate(ranges):
        expected = blake3(memory[at : at + length]).digest()
        made.append(Extent(base + at, length, ChunkId(expected[::-1] if index in wrong else expected)))
    return made


@given(st.data())
def test_it_finds_exactly_the_wrong_ones(data: st.DataObject) -> None:
    memory = bytearray(data.draw(st.binary(min_size=1, max_size=5000)))
    ranges = data.draw(
        st.lists(st.tuples(st.integers(0, len(memory)), st.integers(0, 300)), min_size=1, max_size=30)
    )
    ranges = [(at, min(length, len(memory) - at)) for at, length in ranges]
    wrong = data.draw(st.sets(st.integers(0, len(ranges) - 1)))
    hasher: Hasher = CpuHasher(threads=data.draw(st.integers(1, 3)))
    asked = extents(memory, ranges, wrong)
    assert hasher.mismatches(asked) == sorted(wrong)
    assert hasher.crc64(asked) == [checksums.crc64nvme(bytes(memory[a : a + n])) for a, n in ranges]


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_lengths_and_misalignments_in_one_call(threads: int | None, rng: random.Random) -> None:
    memory = bytearray(rng.randbytes(20 << 20))
    ranges = [(shift, length) for shift in range(17) for length in LENGTHS]
    ranges += [(at, 262_144) for at in range(0, len(memory) - 262_144, 131_072)]
    wrong = set(rng.sample(range(len(ranges)), 9))
    hasher = CpuHasher(threads)
    assert hasher.device == "cpu"
    assert hasher.mismatches(extents(memory, ranges, wrong)) == sorted(wrong)
    assert hasher.mismatches(extents(memory, ranges, set())) == []


def test_it_reads_what_lies_there_now() -> None:
    """Nothing is copied or remembered between calls."""
    memory = bytearray(100_000)
    asked = extents(memory, [(0, 50_000), (50_000, 50_000)], set())
    hasher = CpuHasher()
    assert hasher.mismatches(asked) == []
    memory[99_999] ^= 1
    assert hasher.mismatches(asked) == [1]
    ctypes.memset(asked[0].address, 1, 1)
    assert hasher.mismatches(asked) == [0, 1]


def test_nothing_to_hash() -> None:
    assert CpuHasher().mismatches([]) == [] and CpuHasher().crc64([]) == []
    nothing = Extent(0, 0, ChunkId(blake3(b"").digest()))
    assert CpuHasher().mismatches([nothing]) == []


@given(st.lists(st.tuples(st.integers(0, 2**63), st.integers(0, 2**40), st.binary(min_size=32, max_size=32))))
def test_a_table_is_the_sequence_that_it_was_made_from(rows: list[tuple[int, int, bytes]]) -> None:
    extents = [Extent(address, length, ChunkId(digest)) for address, length, digest in rows]
    table = ExtentTable.of(extents)
    assert [*table] == extents and len(table) == len(extents)
    assert [*table[1:3]] == extents[1:3] and ExtentTable.of(table) is table
