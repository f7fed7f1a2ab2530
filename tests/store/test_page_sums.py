"""store/page_sums.py and store/scrub_state.py: golden bytes, and what is not their encoding."""

from __future__ import annotations

import pytest
from golden import broken
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import ChunkId
from ckptfs.store.page_sums import decode_page_sums, encode_page_sums
from ckptfs.store.scrub_state import Finding, ScrubRun, decode_run, encode_run

GOLDEN_SUMS = bytes.fromhex(
    "434b5053010000000010000000000000"  # "CKPS", version 1, pages of 4096 bytes
    "0200000000000000"  # 2 pages
    "0100000000000000" + "ff" * 8 + "a96faa90e5c3d23d"
)
RUN = ScrubRun(
    1, 0, 7, 4096, 2, (Finding("format", "a bit", None, True), Finding("p", "w", ChunkId(b"\1" * 32))), 3
)
GOLDEN_RUN = bytes.fromhex(
    "97010007cd1000029296a6666f726d6174a56120626974c0c3c0c096a170a177c4200101010101010101010101"
    "010101010101010101010101010101010101010101c2c0c003"
)


def test_golden_bytes() -> None:
    assert encode_page_sums([1, (1 << 64) - 1]) == GOLDEN_SUMS
    assert list(decode_page_sums(GOLDEN_SUMS)) == [1, (1 << 64) - 1]
    assert encode_run(RUN) == GOLDEN_RUN
    assert decode_run(GOLDEN_RUN) == RUN
    assert (RUN.corrupt, RUN.healed) == (4, 1)


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=20), st.data())
def test_any_flipped_bit_of_the_sums_is_corrupt(sums: list[int], data: st.DataObject) -> None:
    encoded = bytearray(encode_page_sums(sums))
    assert list(decode_page_sums(bytes(encoded))) == sums
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Corrupt):
        decode_page_sums(bytes(encoded))


@given(broken(st.just(GOLDEN_SUMS)), broken(st.just(GOLDEN_RUN)))
def test_any_bytes_are_a_value_or_corrupt(sums: bytes, run: bytes) -> None:
    for decode, encoded in ((decode_page_sums, sums), (decode_run, run)):
        try:
            decode(encoded)
        except Corrupt:
            pass
