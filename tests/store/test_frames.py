"""Frames: a reader gets a prefix of what was written, whatever happened to the end of the file."""

from __future__ import annotations

import tracemalloc

import pytest
from golden import broken, plain, vectors
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.frames import OVERHEAD_BYTES, Frame, decode_frames, encode_frame
from ckptfs.store.hashing import crc64
from ckptfs.store.history_scan import scan_history

FRAMES = st.lists(
    st.tuples(st.integers(1, 255), st.integers(0, (1 << 64) - 1), st.binary(max_size=60)), max_size=6
)


def encoded(frames: list[tuple[int, int, bytes]]) -> bytes:
    return b"".join(encode_frame(*frame) for frame in frames)


def fields(frames: list[Frame]) -> list[tuple[int, int, bytes]]:
    return [(frame.kind, frame.sequence, frame.payload) for frame in frames]


@pytest.mark.parametrize("vector", vectors("frames"), ids=lambda v: v["name"])
def test_golden_frames(vector: dict[str, object]) -> None:
    content = bytes.fromhex(str(vector["hex"]))
    frames = list(decode_frames(content))
    assert plain(frames) == vector["frames"]
    assert encoded(fields(frames)) == content


@given(FRAMES)
def test_what_is_encoded_is_decoded(frames: list[tuple[int, int, bytes]]) -> None:
    content = encoded(frames)
    found = list(decode_frames(memoryview(content)))
    assert fields(found) == frames
    assert [len(encoded(frames[: n + 1])) for n in range(len(frames))] == [frame.end for frame in found]
    assert len(content) == sum(OVERHEAD_BYTES + len(payload) for _, _, payload in frames)


@given(FRAMES, st.data())
def test_a_torn_file_gives_the_frames_before_the_tear(
    frames: list[tuple[int, int, bytes]], data: st.DataObject
) -> None:
    content = encoded(frames)
    cut = data.draw(st.integers(0, len(content)))
    whole = [n for n in range(len(frames) + 1) if len(encoded(frames[:n])) <= cut]
    tail = data.draw(st.one_of(st.just(b""), st.binary(max_size=40), st.just(bytes(100))))
    assert fields(list(decode_frames(content[:cut] + tail)))[: whole[-1]] == frames[: whole[-1]]
    assert fields(list(decode_frames(content[:cut]))) == frames[: whole[-1]]


@given(broken(FRAMES.map(encoded)))
def test_any_bytes_are_frames_up_to_somewhere(content: bytes) -> None:
    frames = list(decode_frames(content))
    end = frames[-1].end if frames else 0
    assert encoded(fields(frames)) == content[:end]


@given(FRAMES, st.data())
def test_no_flipped_bit_goes_unnoticed(frames: list[tuple[int, int, bytes]], data: st.DataObject) -> None:
    content = bytearray(encoded(frames))
    if not content:
        return
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    hit = next(n for n in range(len(frames)) if len(encoded(frames[: n + 1])) > at)
    assert fields(list(decode_frames(bytes(content)))) == frames[:hit]


def test_a_claimed_length_costs_no_memory() -> None:
    whole = encode_frame(1, 1, b"x")
    for length in (1 << 30, (1 << 32) - 1):
        content = whole[:8] + length.to_bytes(4, "little") + whole[12:]
        tracemalloc.start()
        assert list(decode_frames(content)) == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


def test_unknown_versions_and_reserved_bits_end_the_reading() -> None:
    whole = encode_frame(1, 1, b"x")
    for at in (4, 5, 6, 7):  # version, kind, reserved
        body = whole[:at] + bytes([0 if at == 5 else 9]) + whole[at + 1 : -8]
        assert list(decode_frames(body + crc64(body).to_bytes(8, "little"))) == []


# ---- the scan of a history, which goes on behind damage --------------------------------------

HISTORIES = st.lists(st.tuples(st.integers(1, 8), st.binary(max_size=40)), max_size=6).map(
    lambda rows: [(kind, n, payload) for n, (kind, payload) in enumerate(rows, 1)]
)


@given(HISTORIES, st.integers(0, 3), st.binary(max_size=30))
def test_the_scan_of_a_whole_history(frames: list[tuple[int, int, bytes]], known: int, tail: bytes) -> None:
    known = min(known, len(frames))
    scan = scan_history(encoded(frames[known:]) + tail, known)
    assert fields(scan.frames) == frames[known:]
    assert (scan.end, scan.damaged) == (len(encoded(frames[known:])), [])


@given(HISTORIES, st.data())
def test_the_scan_loses_the_damaged_frame_and_no_other(
    frames: list[tuple[int, int, bytes]], data: st.DataObject
) -> None:
    content = bytearray(encoded(frames))
    if not content:
        return
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.sampled_from([n for n in range(256) if n.bit_count() > 1]))
    hit = next(n for n in range(len(frames)) if len(encoded(frames[: n + 1])) > at)
    scan = scan_history(bytes(content), 0)
    assert fields(scan.frames) == frames[:hit] + frames[hit + 1 :]
    if hit == len(frames) - 1:
        assert (scan.end, scan.damaged) == (len(encoded(frames[:hit])), [])
    else:
        assert scan.damaged == [(len(encoded(frames[:hit])), len(encoded(frames[: hit + 1])))]
        assert scan.end == len(content)


@given(HISTORIES, st.data())
def test_the_scan_mends_one_flipped_bit(frames: list[tuple[int, int, bytes]], data: st.DataObject) -> None:
    content = bytearray(encoded(frames))
    if not content:
        return
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    scan = scan_history(bytes(content), 0)
    assert fields(scan.frames) == frames
    assert (scan.end, scan.damaged, len(scan.mended)) == (len(content), [], 1)
    start, right = scan.mended[0]
    assert encoded(frames) == bytes(content[:start]) + right + bytes(content[start + len(right) :])


@given(broken(HISTORIES.map(encoded)))
def test_the_scan_of_any_bytes_ends(content: bytes) -> None:
    scan = scan_history(content, 0)
    sequences = [frame.sequence for frame in scan.frames]
    assert sequences == sorted(set(sequences))
    assert 0 <= scan.end <= len(content)
    assert all(start <= end <= scan.end for start, end in scan.damaged)


def test_repeated_frames_are_damage() -> None:
    first, second = encode_frame(1, 1, b"a"), encode_frame(2, 2, b"b")
    scan = scan_history(first + first + second, 0)
    assert fields(scan.frames) == [(1, 1, b"a"), (2, 2, b"b")]
    assert scan.damaged == [(len(first), 2 * len(first))]
    scan = scan_history(first + encode_frame(2, 5, b"b"), 0)
    assert [frame.sequence for frame in scan.frames] == [1, 5]
    assert scan.damaged == [(len(first), len(first))]
