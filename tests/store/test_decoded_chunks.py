"""store/decoded_chunks.py: what is kept is bounded by the memory that it takes."""

from __future__ import annotations

from ckptfs.store.codecs import Plain, whole
from ckptfs.store.decoded_chunks import DecodedChunks
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId


def together(*payloads: bytes, room: int = 100) -> dict[ChunkId, Plain]:
    """Chunks in a buffer of `room` bytes."""
    buffer = memoryview(b"".join(payloads).ljust(room, b"-"))
    found, at = {}, 0
    for payload in payloads:
        found[chunk_id(payload)] = Plain(buffer, at, len(payload))
        at += len(payload)
    return found


def kept(decoded: DecodedChunks, *payloads: bytes) -> list[bool]:
    views = [decoded.view(chunk_id(payload)) for payload in payloads]
    assert all(view in (None, payload) for view, payload in zip(views, payloads, strict=True))
    return [view is not None for view in views]


def test_those_that_share_a_buffer_go_together() -> None:
    decoded = DecodedChunks(250)
    decoded.put(together(b"a", b"bb"))
    decoded.put(together(b"c", b"dd"))
    assert decoded.held_bytes == 200
    assert kept(decoded, b"a", b"c", b"bb", b"x") == [True, True, True, False]
    decoded.put(together(b"e"))
    assert kept(decoded, b"a", b"bb", b"c", b"dd", b"e") == [True, True, False, False, True]
    assert decoded.held_bytes == 200


def test_one_that_was_decoded_again_stays_as_long_as_it_is_wanted() -> None:
    decoded = DecodedChunks(250)
    decoded.put(together(b"a", b"b"))
    decoded.put({chunk_id(b"a"): whole(b"a")})
    assert kept(decoded, b"a") == [True]
    decoded.put(together(b"c"))
    decoded.put(together(b"d"))
    assert kept(decoded, b"a", b"b", b"c", b"d") == [True, False, True, True]
    assert decoded.held_bytes == 201


def test_the_newest_stays_even_if_it_is_too_large() -> None:
    decoded = DecodedChunks(250)
    decoded.put(together(b"a", room=1000))
    assert kept(decoded, b"a") == [True] and decoded.held_bytes == 1000
    decoded.put(together(b"b"))
    assert kept(decoded, b"a", b"b") == [False, True] and decoded.held_bytes == 100
    decoded.put({})
    assert decoded.held_bytes == 100
