"""Finding the newest head: lists that are out of date, numbers that are taken by something damaged."""

from __future__ import annotations

import pytest
import trio
from faultbucket import MemoryBucket

from ckptfs.store.bucket import ObjectMeta
from ckptfs.store.errors import Conflict, Unavailable
from ckptfs.store.ids import UnitId
from ckptfs.store.remote.head import RemoteHead
from ckptfs.store.remote.heads import (
    KEPT,
    SIGNPOST,
    fill_signposts,
    newest_head,
    newest_heads,
    place_head,
    remove_old_heads,
)
from ckptfs.store.remote.names import head_key, parse_head_key
from ckptfs.store.remote.objects import Remote

UNIT = UnitId(bytes(range(16)))


class StaleBucket(MemoryBucket):
    """Its lists show only `listed`, if that is set."""

    listed: frozenset[int] | None = None

    async def list_objects(self, prefix: str) -> list[ObjectMeta]:
        found = await super().list_objects(prefix)
        if self.listed is None:
            return found
        shown = {head_key(UNIT, sequence) for sequence in self.listed}
        gone = [key for key in sorted(shown) if key not in self.objects]
        return [one for one in found if one.key in shown] + [ObjectMeta(key, 1, 1) for key in gone]


def head(sequence: int) -> RemoteHead:
    return RemoteHead(
        unit=UNIT, sequence=sequence, name=b"run", node="n", versions=tuple(range(1, sequence + 1))
    )


async def placed(bucket: MemoryBucket, sequences: range) -> Remote:
    remote = Remote(bucket)
    for sequence in sequences:
        await place_head(remote, head(sequence))
    return remote


@pytest.mark.parametrize("listed", [{5}, {3}, {1, 2, 3, 4, 5}, {3, 5}, {1}])
def test_a_list_may_be_out_of_date(listed: set[int]) -> None:
    async def main() -> None:
        bucket = StaleBucket()
        remote = await placed(bucket, range(1, 6))
        bucket.listed = frozenset(listed)
        found = await newest_head(remote, UNIT)
        assert (found.head, found.sequence, found.problems) == (head(5), 5, ())
        assert found.modified_ns == bucket.objects[head_key(UNIT, 5)].modified_ns
        assert await newest_heads(remote) == [found]

    trio.run(main)


@pytest.mark.parametrize("listed", [{5}, {3}, {3, 5}, {1, 2, 3, 4, 5}])
def test_a_damaged_head_gives_way_to_the_one_right_before_it(listed: set[int]) -> None:
    """Whether or not the list shows that: going on from an older one would lose versions."""

    async def main() -> None:
        bucket = StaleBucket()
        remote = await placed(bucket, range(1, 6))
        bucket.flip(head_key(UNIT, 5), 100)
        bucket.listed = frozenset(listed)
        found = await newest_head(remote, UNIT)
        assert (found.head, found.sequence) == (head(4), 5)
        assert len(found.problems) == 1 and head_key(UNIT, 5) in found.problems[0]

    trio.run(main)


def test_what_is_remembered_is_looked_for() -> None:
    async def main() -> None:
        bucket = StaleBucket()
        remote = await placed(bucket, range(1, 13))
        await remove_old_heads(remote, UNIT, 12)
        assert bucket.keys("heads") == [head_key(UNIT, sequence) for sequence in range(12 - KEPT + 1, 13)]
        bucket.listed = frozenset()
        assert (await newest_head(remote, UNIT, 11)).head == head(12)
        assert (await newest_head(remote, UNIT, 99)).sequence == 12, "it was put back"

    trio.run(main)


@pytest.mark.parametrize("newest", [7, 15, 16, 17, 40, 64, 100])
@pytest.mark.parametrize("listed", [(), (3,)])
def test_the_newest_is_found_without_a_list(newest: int, listed: tuple[int, ...]) -> None:
    """Also by who remembers nothing: to take an older one for it would lose versions."""

    async def main() -> None:
        bucket = StaleBucket()
        remote = await placed(bucket, range(1, newest + 1))
        await remove_old_heads(remote, UNIT, newest)
        kept = [parse_head_key(key) for key in bucket.keys("heads")]
        signposts = [*range(SIGNPOST, max(0, newest - KEPT) + 1, SIGNPOST)]
        assert [one[1] for one in kept if one] == [*signposts, *range(max(0, newest - KEPT) + 1, newest + 1)]
        bucket.listed = frozenset(listed if newest <= KEPT else ())
        assert (await newest_head(remote, UNIT)).head == head(newest)

    trio.run(main)


def test_numbers_that_are_passed_over_get_signposts() -> None:
    async def main() -> None:
        bucket = StaleBucket()
        remote = await placed(bucket, range(1, 20))
        await fill_signposts(remote, head(70), 19)
        await place_head(remote, head(70))
        bucket.listed = frozenset()
        assert (await newest_head(remote, UNIT)).head == head(70)

    trio.run(main)


def test_no_head_is_no_error_and_heads_that_go_are() -> None:
    async def main() -> None:
        bucket = StaleBucket()
        remote = Remote(bucket)
        found = await newest_head(remote, UNIT)
        assert (found.head, found.sequence) == (None, 0) and await newest_heads(remote) == []
        bucket.listed = frozenset({3})
        with pytest.raises(Unavailable, match="try again"):
            await newest_head(remote, UNIT)

    trio.run(main)


def test_a_number_is_taken_once() -> None:
    async def main() -> None:
        remote = await placed(MemoryBucket(), range(1, 3))
        await place_head(remote, head(2))
        other = RemoteHead(unit=UNIT, sequence=2, name=b"run", node="another")
        with pytest.raises(Conflict):
            await place_head(remote, other)
        assert (await newest_head(remote, UNIT)).head == head(2)

    trio.run(main)
