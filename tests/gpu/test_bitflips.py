"""The study of flipped bits: patterns do what their names say, and the numbers are those of the theory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from awscrt import checksums
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.gpu import bitflips
from ckptfs.gpu.crc_distance import missed
from ckptfs.gpu.flip_patterns import CRC32C, CRC64, flip, patterns
from ckptfs.gpu.flip_study import CHECKS, study, study_bits

BY_NAME = {pattern.name: pattern for pattern in patterns(16, 8)}


@given(st.binary(min_size=16, max_size=200), st.data())
def test_a_flip_is_its_own_undoing(content: bytes, data: st.DataObject) -> None:
    bits = data.draw(st.sets(st.integers(0, 8 * len(content) - 1), min_size=1))
    chunk = np.frombuffer(bytearray(content), np.uint8)
    flip(chunk, sorted(bits))
    changed = np.unpackbits(chunk ^ np.frombuffer(content, np.uint8), bitorder="little")
    assert set(np.flatnonzero(changed)) == bits
    flip(chunk, sorted(bits))
    assert chunk.tobytes() == content


@pytest.mark.parametrize("name", BY_NAME)
def test_patterns_stay_in_the_chunk_and_flip_what_they_say(name: str, rng: random.Random) -> None:
    chunk = np.frombuffer(bytearray(rng.randbytes(16_384)), np.uint8)
    before = chunk.tobytes()
    for _ in range(20):
        bits = BY_NAME[name].bits(chunk, rng)
        assert bits and len(set(bits)) == len(bits) and min(bits) >= 0 and max(bits) < 8 * len(chunk)
        assert chunk.tobytes() == before
        if name.split()[1].startswith("bit"):
            made_to_fool = {"33": CRC32C, "65": CRC64}.get(name.split(maxsplit=1)[0])
            count = (
                made_to_fool.bit_count() + 1 if made_to_fool is not None else int(name.split(maxsplit=1)[0])
            )
            assert len(bits) == count
        if name.startswith("burst"):
            assert max(bits) - min(bits) + 1 == int(name.split()[2])
    if "exponent" in name or "sign" in name:
        assert bits[0] % 16 == {"highest": 14, "lowest": 7}.get(name.split()[2], 15)
    if "exchanged" in name:
        flip(chunk, bits)
        size = 8 if "words" in name else 4096
        assert sorted(chunk.tobytes()[n : n + size] for n in range(0, 16_384, size)) == sorted(
            before[n : n + size] for n in range(0, 16_384, size)
        )


def test_the_checks_are_those_of_the_packages(rng: random.Random) -> None:
    content = rng.randbytes(8192)
    chunk = np.frombuffer(content, np.uint8)
    words = [int.from_bytes(content[n : n + 8], sys.byteorder) for n in range(0, 8192, 8)]
    folded = 0
    for word in words:
        folded ^= word
    expected = (checksums.crc32c(content), checksums.crc64nvme(content), folded, blake3(content).digest())
    assert tuple(check(chunk) for check in CHECKS.values()) == expected


def test_what_is_missed_is_what_theory_says(rng: random.Random) -> None:
    chunk = np.frombuffer(bytearray(rng.randbytes(16_384)), np.uint8)
    before = chunk.tobytes()
    rows = {row.pattern: row for row in study(chunk, patterns(16, 8), 40, rng)}
    assert chunk.tobytes() == before
    folded = {
        "2 bits, one place of two words",
        "4 bits, two places of two words",
        "two words of 8 bytes, exchanged",
        "two pages of 4 KiB, exchanged",
    }
    for name, row in rows.items():
        fools_crc32c, fools_crc64 = name.endswith("fool CRC-32C"), name.endswith("fool CRC-64")
        assert row.missed["BLAKE3"] == 0
        assert row.missed["CRC-32C"] == (40 if fools_crc32c else 0), name
        assert row.missed["CRC-64"] == (40 if fools_crc64 else 0), name
        if name in folded:
            assert row.missed["XOR-64"] == 40, name
        elif name.startswith(("1 bit", "3 bits")) or (
            name.startswith("burst") and int(name.split()[2]) <= 64
        ):
            assert row.missed["XOR-64"] == 0, name


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_a_flip_at_each_bit_of_an_element(dtype: str, rng: random.Random) -> None:
    numbers = np.full(8192, 1.5)
    if dtype == "BF16":
        content = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        content = numbers.astype({"F16": "f2", "F32": "f4", "F64": "f8"}[dtype]).tobytes()
    chunk = np.frombuffer(bytearray(content), np.uint8)
    rows = [*study_bits(chunk, dtype, 20, rng)]
    assert chunk.tobytes() == content and not any(sum(row.missed.values()) for row in rows)
    assert [row.part for row in rows[-2:]] == ["exponent", "sign"] and rows[0].part == "mantissa"
    assert rows[-1].median_change == 2 and rows[-2].not_finite == 1.0
    assert rows[0].median_change == pytest.approx(2.0 ** -sum(row.part == "mantissa" for row in rows) / 1.5)


@pytest.mark.parametrize(("polynomial", "width"), [(CRC32C, 32), (CRC64, 64)])
def test_crcs_detect_every_error_of_up_to_three_bits(polynomial: int, width: int) -> None:
    found = missed(polynomial, width, 1 << 16)
    assert found.none and found.bits == 1 << 16


@pytest.mark.parametrize("polynomial", [0x07, 0x31, 0x9B, 0x4D])
def test_what_is_missed_is_counted_rightly(polynomial: int) -> None:
    """Against trying every error, with CRCs of 8 bits, which do miss some."""
    bits = 200

    def remainder(error: int) -> int:
        for at in range(error.bit_length() - 1, 7, -1):
            if error >> at & 1:
                error ^= (0x100 | polynomial) << at - 8
        return error

    single = [remainder(1 << n) for n in range(bits)]
    found = missed(polynomial, 8, bits)
    assert found.single == sum(not one for one in single)
    pairs = [(a, b) for a in range(1, bits) for b in range(a + 1, bits)]
    has_pair = any(single[0] ^ single[n] == 0 for n in range(1, bits))
    assert (found.double > 0) == has_pair
    assert (found.triple > 0) == any(single[0] ^ single[a] ^ single[b] == 0 for a, b in pairs)
    assert not missed(polynomial, 8, 9).single


def answer(*arguments: str) -> Mapping[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "ckptfs.gpu.bitflips", *arguments, "--json"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


def test_the_command_on_a_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = tmp_path / "m.safetensors"
    arrays = {"a": np.random.default_rng(1).standard_normal(40_000).astype(np.float32)}
    safetensors.numpy.save_file(arrays, shard)
    before = shard.read_bytes()
    found = answer("--shard", str(shard), "--trials", "4", "--no-proof", "--seed", "7")
    assert (found["dtype"], found["chunk_bytes"], found["seed"]) == ("F32", 39 * 4096, 7)
    rows: Sequence[Mapping[str, Any]] = found["patterns"]
    assert {row["trials"] for row in rows} == {4} and len(found["by_bit"]) == 32
    assert found == answer("--shard", str(shard), "--trials", "4", "--no-proof", "--seed", "7")
    assert shard.read_bytes() == before

    assert bitflips.main(["--trials", "2", "--no-proof"]) == 0
    text = capsys.readouterr().out
    assert "are no misses of a CRC-64: here it\nmissed 0 of 16 flips" in text and "100.00%" in text
    for bad in ("absent", str(tmp_path)):
        assert bitflips.main(["--shard", bad]) == 1
        assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "text").write_text("no tensors")
    assert bitflips.main(["--shard", str(tmp_path / "text")]) == 1
