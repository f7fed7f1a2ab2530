"""sending: what is encoded is decoded in the worker that reads it, by the places it was given; memory is used
again, but not while somebody looks at it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import trio
from encoded_series import PATH, Series, saves
from faultbucket import MemoryBucket
from remoteruns import small_packs
from saved_store import SavedStore
from small_store import SmallStore, memory_or

from ckptfs.store.bucket import ObjectMeta
from ckptfs.store.layout import Format, encode_format
from ckptfs.store.places import Places
from ckptfs.store.remote.copied import CopiedUnits
from ckptfs.store.remote.filling import Buffers, fill_pack
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.pack import encode_pack
from ckptfs.store.remote.push import Pusher, PushReport
from ckptfs.store.remote.reading import _read, locate, read_chunks
from ckptfs.store.remote.sending import PACK_BYTES, _parts


def test_each_part_of_what_is_sent_can_be_decoded_by_itself(tmp_path: Path) -> None:
    root = memory_or(tmp_path)
    (root / "format").write_bytes(encode_format(Format()))
    store = SmallStore(root)
    try:
        series = Series(store, saves(3, values=PACK_BYTES // 7))
        series.encode_all()
        wanted = np.unique(np.array(series.chunks(0, PATH) + series.chunks(1, PATH), "S32"))
        parts = _parts(locate(store.segments, wanted))
        assert len(parts) > 1 and any(part.encoded_ones() for part in parts)

        async def read() -> list[list[bytes | None]]:
            return [await trio.to_thread.run_sync(_read, store.disk, part) for part in parts]

        payloads = [payload for part in trio.run(read) for payload in part]
        assert len(payloads) == len(wanted) and None not in payloads
        trio.run(check_packs, store, parts)
    finally:
        store.close()
        shutil.rmtree(root)


async def check_packs(store: SmallStore, parts: list[Places]) -> None:
    """Packs that are made in memory used again are those that are made of their chunks."""
    buffers, used = Buffers(), set[int]()
    for part in parts:
        pack = await fill_pack(buffers, store.disk, store.segments, part, 7)
        used.add(id(pack.obj))
        assert pack == encode_pack(await read_chunks(store.disk, store.segments, part), 7)
        buffers.give_back(pack)
    assert len(used) == 1


def test_memory_is_not_used_again_while_somebody_has_a_view_of_it() -> None:
    buffers = Buffers()
    one = buffers.take(5)
    memory, left_behind = one.obj, one[1:3]
    buffers.give_back(one)
    other = buffers.take(5)
    assert other.obj is not memory
    other_memory = other.obj
    buffers.give_back(other)
    left_behind.release()
    again = buffers.take(1 << 20)
    assert again.obj is other_memory and len(again) == 1 << 20


class LookingBucket(MemoryBucket):
    """One that notes which packs it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_for: list[str] = []

    async def stat(self, key: str) -> ObjectMeta:
        if key.startswith("packs/"):
            self.looked_for.append(key)
        return await super().stat(key)


def test_packs_are_looked_for_where_a_push_died_and_not_where_nothing_is(tmp_path: Path) -> None:
    store, bucket = SavedStore(tmp_path), LookingBucket()
    unit = store.unit(b"run").unit

    async def push(name: str) -> PushReport:
        copied = CopiedUnits(store.index, name)
        one = Pusher(Remote(bucket), store.disk, store.segments, store.histories, copied, "n")
        return await one.push(unit)

    async def main() -> None:
        made = {b"%d" % seed: random.Random(seed).randbytes(50_000) for seed in range(40)}
        await store.publish(b"run", made)
        first = await push("first")
        packs = bucket.keys("packs")
        # Until it is known of the first, the next are asked for; and each is asked for once.
        assert len(packs) > 30 and len(bucket.looked_for) < 8 and first.sent.chunks > 40
        for key in set(bucket.keys()) - {*packs}:
            await bucket.remove(key)
        bucket.looked_for.clear()
        again = await push("second")
        assert again.copied == [1] and again.sent.chunks == 0
        assert sorted(bucket.looked_for) == bucket.keys("packs") == packs

    try:
        with small_packs(0.0):
            trio.run(main)
    finally:
        store.close()
