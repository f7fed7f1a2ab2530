"""Kernels with one mistake each: the tests of the kernels notice it, or it is shown to be none.

One rule: a mutant that is said to be equivalent has to pass all that the shipped kernels pass.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from emulated import SOURCES, build_kernels
from test_kernels import run_cases


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old`, after `which` others, becomes `new`; `equivalent` says why that is no mistake."""

    name: str
    file: str
    old: str
    new: str
    which: int = 0
    cases: str = "few"
    equivalent: str = ""


_BARRIER = "__syncthreads();"
MUTANTS = [
    Mutant("no barrier between the levels of a tree", "blake3.cu", _BARRIER, ""),
    Mutant("no barrier before the value of a segment", "blake3.cu", _BARRIER, "", 1),
    Mutant("no barrier between the levels of segments", "blake3.cu", _BARRIER, "", 2),
    Mutant("no barrier behind the tables", "crc64.cu", _BARRIER, ""),
    Mutant("no barrier between sums", "crc64.cu", _BARRIER, "", 1),
    Mutant("no barrier between the levels of remainders", "crc64.cu", _BARRIER, "", 2),
    Mutant("a wrong rotation", "blake3.cu", "b = rotate_right(b ^ c, 12);", "b = rotate_right(b ^ c, 11);"),
    Mutant("a wrong permutation", "blake3.cu", "m[2], m[6]", "m[6], m[2]"),
    Mutant("six rounds", "blake3.cu", "round < 7", "round < 6"),
    Mutant("no ROOT on the only leaf", "blake3.cu", "leaves == 1 ? root : 0", "0"),
    Mutant("ROOT on every leaf", "blake3.cu", "leaves == 1 ? root : 0", "root"),
    Mutant("no ROOT on the only segment", "blake3.cu", "2 * span >= leaves ? root : 0", "0"),
    Mutant("no ROOT on what was joined", "blake3.cu", "2 * span >= segments ? ROOT : 0", "0"),
    Mutant("no PARENT", "blake3.cu", "PARENT | root", "root"),
    Mutant("no CHUNK_END", "blake3.cu", "CHUNK_END | root", "root"),
    Mutant("CHUNK_START on every block", "blake3.cu", "flags = 0;", ""),
    Mutant("every leaf is the first", "blake3.cu", "words, leaf, last", "words, 0, last"),
    Mutant("every block is whole", "blake3.cu", "last ? left : BLOCK_BYTES, flags", "BLOCK_BYTES, flags"),
    Mutant(
        "a leaf without a partner is joined", "blake3.cu", "node + span < leaves", "node + span <= leaves"
    ),
    Mutant(
        "an eighth of a digest is not compared",
        "blake3.cu",
        "i < 8; i++) difference",
        "i < 7; i++) difference",
    ),
    Mutant("nobody counts", "blake3.cu", "if (difference != 0) atomicAdd(bad_count, 1u);", ""),
    Mutant(
        "one turn for each thread that joins",
        "blake3.cu",
        "node += 2 * span * JOIN_THREADS",
        "node = segments",
        0,
        "long",
    ),
    Mutant(
        "one turn in joining remainders",
        "crc64.cu",
        "node += 2 * span * JOIN_THREADS",
        "node = segments",
        0,
        "long",
    ),
    Mutant("a wrong shift of unaligned words", "load.cuh", "high, 8 * skew", "high, 4 * skew"),
    Mutant("wide loads at any even address", "load.cuh", "at % 16 == 0", "at % 8 == 0"),
    Mutant("reads the word before the extent", "load.cuh", "offset >= skew &&", "offset >= 0 &&"),
    Mutant(
        "reads the word behind the extent", "load.cuh", "BLOCK_BYTES + 4 <= length", "BLOCK_BYTES <= length"
    ),
    Mutant("bytes behind the end", "load.cuh", "place < length", "place <= length"),
    Mutant("bytes before the start", "load.cuh", "place >= 0 &&", "place >= -1 &&"),
    Mutant("leaves of remainders all in one place", "crc64.cu", "TABLES.leaves[thread]", "TABLES.leaves[0]"),
    Mutant("a wrong power of x between segments", "crc64.cu", "level = 20", "level = 19"),
    Mutant("the other polynomial, CRC-64/XZ", "crc64.cu", "0x9a6c9329ac4bc9b5", "0xc96c5795d7870f42"),
    Mutant(
        "no upper half of the counter",
        "blake3.cu",
        "static_cast<uint32_t>(counter >> 32)",
        "0",
        cases="far",
    ),
    Mutant(
        "offsets of 32 bits",
        "blake3.cu",
        "start = leaf * LEAF_BYTES",
        "start = static_cast<uint32_t>(leaf * LEAF_BYTES)",
        cases="far",
    ),
    Mutant(
        "offsets of 32 bits from the end",
        "crc64.cu",
        "static_cast<int64_t>(leaf * LEAF_BYTES)",
        "static_cast<uint32_t>(leaf * LEAF_BYTES)",
        cases="far",
    ),
    Mutant(
        "places of 32 bits",
        "load.cuh",
        "length = static_cast<int64_t>(",
        "length = static_cast<uint32_t>(",
        cases="far",
    ),
    Mutant(
        "aligned words by way of the shift",
        "load.cuh",
        "inside && skew == 0",
        "inside && at % 8 == 0",
        equivalent="a shift by nothing of words within the extent; else the bytes one by one",
    ),
    Mutant(
        "the block of nothing before an extent",
        "crc64.cu",
        "offset + BLOCK_BYTES <= 0",
        "offset + BLOCK_BYTES < 0",
        equivalent="leading zeros leave a remainder of zero as it is",
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_noticed(mutant: Mutant, emulator: Path, seed: int, tmp_path: Path) -> None:
    sources = tmp_path / "native"
    shutil.copytree(SOURCES, sources)
    file = sources / mutant.file
    pieces = file.read_text().split(mutant.old)
    assert len(pieces) > mutant.which + 1, "the source has changed; the mutant has to follow"
    head, tail = pieces[: mutant.which + 1], pieces[mutant.which + 1 :]
    file.write_text(mutant.old.join(head) + mutant.new + mutant.old.join(tail))
    done = run_cases(build_kernels(tmp_path, emulator, sources), seed, mutant.cases)
    assert (done.returncode == 0) == bool(mutant.equivalent), done.stdout + done.stderr
