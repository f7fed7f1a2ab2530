"""The digests are those of the standards: published answers, and independent implementations."""

from __future__ import annotations

import pytest
from Crypto.Hash import SHA3_256
from golden import vectors
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.hashing import chunk_id, crc64, sha3

_POLYNOMIAL = 0x9A6C9329AC4BC9B5  # CRC-64/NVME, reflected


def naive_crc64(payload: bytes) -> int:
    crc = (1 << 64) - 1
    for byte in payload:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
    return crc ^ (1 << 64) - 1


@pytest.mark.parametrize("vector", vectors("hashing"), ids=lambda v: v["name"])
def test_published_answers(vector: dict[str, str]) -> None:
    payload = bytes.fromhex(vector["payload"]) * int(vector.get("repeat", "1"))
    match vector["hash"]:
        case "blake3":
            assert chunk_id(payload).hex() == vector["digest"]
        case "sha3-256":
            assert sha3(payload).hex() == vector["digest"]
        case "crc-64/nvme":
            assert f"{crc64(payload):016x}" == vector["digest"]
        case other:
            pytest.fail(other)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_crc(first: bytes, second: bytes) -> None:
    assert crc64(first) == naive_crc64(first)
    assert crc64(second, crc64(first)) == crc64(first + second)


@given(st.binary(max_size=1000))
def test_sha3_is_not_keccak(payload: bytes) -> None:
    assert sha3(payload) == SHA3_256.new(payload).digest()


@given(st.binary(max_size=5000))
def test_every_buffer_hashes_alike(payload: bytes) -> None:
    for kind in (bytearray, memoryview):
        assert (chunk_id(kind(payload)), sha3(kind(payload)), crc64(kind(payload))) == (
            chunk_id(payload),
            sha3(payload),
            crc64(payload),
        )
