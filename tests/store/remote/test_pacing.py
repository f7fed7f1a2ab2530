"""No more is sent than the rate allows, by however many at once."""

from __future__ import annotations

import trio
import trio.testing
from faultbucket import MemoryBucket

from ckptfs.store.remote.pacing import PacedBucket


def test_the_rate_holds_for_all_who_send() -> None:
    async def main() -> None:
        bucket = PacedBucket(MemoryBucket(), 1000.0)
        begun = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(bucket.create, str(number), bytes(2500))
        assert 7.5 <= trio.current_time() - begun < 7.6, "the last begins when three have had their time"
        await bucket.overwrite("0", bytes(100))
        assert trio.current_time() - begun >= 10.0
        await trio.sleep(100)
        later = trio.current_time()
        await bucket.create("later", b"x")
        assert trio.current_time() - later < 0.1, "what was not used is not owed"
        assert await bucket.read("later") == b"x" and len(await bucket.list_objects("")) == 5
        assert trio.current_time() - later < 0.1, "reading costs nothing"

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
