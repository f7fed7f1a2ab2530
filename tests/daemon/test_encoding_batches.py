"""encoding_batches: how many chunks go at a time, and what becomes of one that the encoder fails of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio

from ckptfs.daemon.encoding_batches import CarefulEncoding, batches
from ckptfs.daemon.encoding_worker import EncoderDied
from ckptfs.store.encoding_level import Level
from ckptfs.store.encoding_plan import PlannedChunk
from ckptfs.store.errors import Corrupt, Unavailable
from ckptfs.store.ids import ChunkId
from ckptfs.store.reencode import BATCH_BYTES, BATCH_CHUNKS, Encoding


def planned(count: int, length: int = 1000) -> list[PlannedChunk]:
    return [PlannedChunk(ChunkId(number.to_bytes(32, "big")), length) for number in range(count)]


class Encoder:
    """Fails whenever `culprits` are in a batch; each `lives` times at most."""

    def __init__(self, culprits: set[int], error: type[Exception] = EncoderDied, lives: int = 1000) -> None:
        self.culprits = {ChunkId(number.to_bytes(32, "big")): lives for number in culprits}
        self.error = error
        self.calls = 0
        self.done: list[ChunkId] = []

    async def encode(self, batch: Sequence[PlannedChunk], level: Level) -> Encoding:
        self.calls += 1
        for one in batch:
            if self.culprits.get(one.chunk):
                self.culprits[one.chunk] -= 1
                raise self.error("it is gone")
        self.done += [one.chunk for one in batch]
        return Encoding(chunks=len(batch))


def test_a_batch_is_bounded_by_bytes_and_by_chunks() -> None:
    small = planned(3 * BATCH_CHUNKS + 1, 1)
    assert [len(batch) for batch in batches(small)] == [BATCH_CHUNKS] * 3 + [1]
    large = planned(9, BATCH_BYTES // 4)
    assert [len(batch) for batch in batches(large)] == [4, 4, 1]
    assert [one for batch in batches(small) for one in batch] == small


@pytest.mark.parametrize("error", [EncoderDied, Corrupt])
def test_what_the_encoder_fails_of_stays_raw_and_is_not_tried_again(error: type[Exception]) -> None:
    encoder = Encoder({0, 37, 99}, error)
    careful = CarefulEncoding(encoder.encode)
    chunks = planned(100)
    done = trio.run(careful.encode, chunks)
    assert careful.left_raw == encoder.culprits.keys() and done.chunks == 97
    assert encoder.done == [one.chunk for one in chunks if one.chunk not in careful.left_raw], (
        "in their order"
    )
    calls = encoder.calls
    assert calls < 60
    trio.run(careful.encode, chunks)
    assert encoder.calls == calls + 1


def test_one_that_was_killed_by_somebody_is_tried_again() -> None:
    encoder = Encoder({0}, lives=1)
    careful = CarefulEncoding(encoder.encode)
    assert trio.run(careful.encode, planned(1)).chunks == 1
    assert not careful.left_raw


def test_where_everything_fails_it_is_not_the_chunks() -> None:
    encoder = Encoder(set(range(1000)))
    careful = CarefulEncoding(encoder.encode)
    with pytest.raises(EncoderDied):
        trio.run(careful.encode, planned(1000))
    assert not careful.left_raw, "so none of them is blamed"


def test_what_has_nothing_to_do_with_the_chunks_is_told_at_once() -> None:
    encoder = Encoder({5}, Unavailable)
    with pytest.raises(Unavailable):
        trio.run(CarefulEncoding(encoder.encode).encode, planned(10))
    assert encoder.calls == 1
