"""sending: what is encoded is decoded in the worker that reads it, by the places it was given."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import trio
from encoded_series import PATH, Series, saves
from small_store import SmallStore, memory_or

from ckptfs.store.layout import Format, encode_format
from ckptfs.store.remote.reading import _read, locate
from ckptfs.store.remote.sending import PACK_BYTES, _groups


def test_each_part_of_what_is_sent_can_be_decoded_by_itself(tmp_path: Path) -> None:
    root = memory_or(tmp_path)
    (root / "format").write_bytes(encode_format(Format()))
    store = SmallStore(root)
    try:
        series = Series(store, saves(3, values=PACK_BYTES // 7))
        series.encode_all()
        wanted = np.unique(np.array(series.chunks(0, PATH) + series.chunks(1, PATH), "S32"))
        parts = [part for group in _groups(locate(store.segments, wanted)) for part in group]
        assert len(parts) > 1 and any(part.encoded_ones() for part in parts)

        async def read() -> list[list[bytes | None]]:
            return [await trio.to_thread.run_sync(_read, store.disk, part) for part in parts]

        payloads = [payload for part in trio.run(read) for payload in part]
        assert len(payloads) == len(wanted) and None not in payloads
    finally:
        store.close()
        shutil.rmtree(root)
