"""Runs a compiled set of kernels over extents of every kind; ends with 0 if every answer is right.

    kernel_cases.py LIBRARY SEED all|few|long|far

A process of its own, since wrong kernels may end it. All but `all` are what mutants are tried on.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
from pathlib import Path

from blake3_by_hand import LEAF_BYTES, subtree
from emulated import EmulatedHasher, Order
from guarded import Guarded

from ckptfs.gpu.crc64 import from_remainder
from ckptfs.gpu.extents import Extent
from ckptfs.store.hashing import chunk_id, crc64
from ckptfs.store.ids import ChunkId

_SEGMENT = 128 << 10
_AROUND = (1, 2, 16, 32, 64, 128, 256, 512, 960, 1024, 1088, 2048, 3072, 4096, 8192)
_WHOLE = (64 << 10, 127 << 10, _SEGMENT, 129 << 10, 2 * _SEGMENT, 3 * _SEGMENT, 5 * _SEGMENT)
# Just below and beyond what 32 bits count: bytes, and (4 TiB) leaves of BLAKE3.
FAR = ((4 << 30) - _SEGMENT, 4 << 30, (5 << 30) + _SEGMENT, (1 << 42) + 3 * _SEGMENT)
_MAP_NORESERVE = 0x4000  # of Linux; Python 3.11 has no name for it
Case = tuple[Guarded, bytes]
Wanted = list[tuple[int, int]]


def every_length(rng: random.Random) -> Wanted:
    """More than 1,000 pairs of length and address modulo 16: each length at each alignment, some of any
    length, and the long ones."""
    around = sorted({length + off for length in _AROUND for off in (-1, 0, 1)})
    wanted = [(length, skew) for length in around for skew in range(16)]
    wanted += [(rng.randrange(20_000), rng.randrange(16)) for _ in range(350)]
    wanted += [(length + off, rng.randrange(16)) for length in _WHOLE for off in (-1, 0, 1)]
    wanted += [(length, 0) for length in _WHOLE]
    wanted += [((1 << 20) + 3, 4), ((4 << 20) + 7, 0), ((4 << 20) + 7, 5)]
    rng.shuffle(wanted)
    return wanted


def few_lengths(rng: random.Random) -> Wanted:
    """A few of each kind, small enough to run dozens of times."""
    wanted = [(length + off, rng.randrange(16)) for length in _AROUND for off in (-1, 0, 1)]
    wanted += [(length, skew) for length in (67, 1100, 4099) for skew in range(16)]
    wanted += [(_SEGMENT + off, skew) for off, skew in ((-1, 0), (0, 1), (1, 2))]
    wanted += [(2 * _SEGMENT, 0), (5 * _SEGMENT + 1, 8), (66 * 1024, 3)]
    rng.shuffle(wanted)
    return wanted


def long_length(_: random.Random) -> Wanted:
    """One extent of so many segments that the threads which join them take more than one turn each."""
    return [(70 * _SEGMENT - 1500, 0)]


def _placed(wanted: Wanted, rng: random.Random) -> list[Case]:
    payloads = [rng.randbytes(length) for length, _ in wanted]
    skewed = zip(payloads, wanted, strict=True)
    return [(Guarded(load, skew, at_start=rng.random() < 0.5), load) for load, (_, skew) in skewed]


def check(hasher: EmulatedHasher, cases: list[Case], rng: random.Random) -> str | None:
    """What is wrong with the answers to all of `cases` in one launch each, or None."""
    bad = sorted(rng.sample(range(len(cases)), len(cases) // 8))
    ids = [chunk_id(payload) for _, payload in cases]
    for index in bad:
        ids[index] = _flipped(ids[index], rng.randrange(256))
    extents = [Extent(held.address, held.length, each) for (held, _), each in zip(cases, ids, strict=True)]
    said = hasher.mismatches(extents)
    if said != bad:
        wrong = {extents[index].length for index in set(said) ^ set(bad)}
        return f"{hasher.order.name}: BLAKE3 wrong for lengths {sorted(wrong)[:8]}"
    answers = hasher.crc64(extents)
    for (held, payload), answer in zip(cases, answers, strict=True):
        if answer != crc64(payload):
            return f"{hasher.order.name}: CRC-64 wrong for length {held.length}"
    return None


def check_far(hasher: EmulatedHasher, offset: int, rng: random.Random) -> str | None:
    """The same of an extent of which hardly anything is there: a segment at `offset` and one as far from the
    end; the others are not run."""
    number, size = offset // _SEGMENT, offset + 3 * _SEGMENT + 77
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE) as far:
        payload = rng.randbytes(_SEGMENT)
        # CRC-64 counts segments from the end: `number` begins two segments and 77 bytes from the start.
        for at in (offset, 2 * _SEGMENT + 77, size - _SEGMENT):
            far[at : at + _SEGMENT] = payload
        place = ctypes.c_char.from_buffer(far)
        extent = Extent(ctypes.addressof(place), size, chunk_id(b""))
        value = hasher.one_segment("blake3_segments", extent, number, 32)
        remainders = [hasher.one_segment("crc64_segments", extent, each, 8) for each in (0, number)]
        del place
    leaves = [payload[at : at + LEAF_BYTES] for at in range(0, _SEGMENT, LEAF_BYTES)]
    if value != subtree(leaves, offset // LEAF_BYTES):
        return f"BLAKE3 wrong for the segment at byte {offset}"
    sums = [from_remainder(int.from_bytes(one, "little"), _SEGMENT) for one in remainders]
    return None if sums == [crc64(payload)] * 2 else f"CRC-64 wrong for an extent of {size} bytes"


def _flipped(identity: ChunkId, bit: int) -> ChunkId:
    changed = bytearray(identity)
    changed[bit // 8] ^= 1 << bit % 8
    return ChunkId(bytes(changed))


def main() -> int:
    library, seed, which = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    rng = random.Random(seed)
    kinds = {"all": every_length, "few": few_lengths, "long": long_length, "far": lambda _: []}
    cases = _placed(kinds[which](rng), rng)
    hasher = EmulatedHasher(library)
    if which == "far":
        wrongs = [wrong for offset in FAR if (wrong := check_far(hasher, offset, rng)) is not None]
        print("; ".join(wrongs))
        return len(wrongs)
    for order in Order:
        hasher.order, hasher.seed = order, rng.getrandbits(64)
        wrong = check(hasher, cases, rng)
        if wrong is not None:
            print(wrong)
            return 1
    print(f"{len(cases)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
