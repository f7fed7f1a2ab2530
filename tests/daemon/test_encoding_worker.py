"""encoding_worker: a process that dies, cannot be started, or leaves an .idx that cannot be read: no file of
the batch stays, and the error says which of these it was."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from encoded_series import Series, encoded_chunks, saves
from small_store import SmallStore, memory_or

from ckptfs.daemon import encoding_worker
from ckptfs.daemon.encoding_worker import EncoderDied, EncodingWorker
from ckptfs.store.disk import Disk
from ckptfs.store.encoding_batch import EncodingBatch
from ckptfs.store.errors import Corrupt, Unavailable
from ckptfs.store.layout import LOCK_PATH, Format, encode_format
from ckptfs.store.reencode import Reencoder
from ckptfs.store.segment_format import SegmentIndex, segment_paths


@pytest.fixture
def series(tmp_path: Path) -> Iterator[Series]:
    root = memory_or(tmp_path)
    (root / "format").write_bytes(encode_format(Format()))
    (root / LOCK_PATH).touch()
    store = SmallStore(root)
    try:
        yield Series(store, saves(2, values=30_000))
    finally:
        store.close()
        shutil.rmtree(root)


def encode(series: Series) -> None:
    """Encode the first save in a process."""
    store = series.store
    worker = EncodingWorker(store.disk)
    one = Reencoder(store.disk, store.index, store.segments, store.ingest.committer, worker.run)

    async def scenario() -> None:
        try:
            await one.encode(series.planned(0))
        finally:
            await worker.close()

    trio.run(scenario)


def test_a_process_encodes(series: Series) -> None:
    encode(series)
    assert encoded_chunks(series, 0)
    series.check()


def test_its_memory_is_not_given_back_between_chunks(series: Series, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = EncodingWorker._asked
    environments: list[bytes] = []

    async def looked_at(self: EncodingWorker, batch: EncodingBatch) -> object:
        assert self._process is not None
        environments.append(Path(f"/proc/{self._process.pid}/environ").read_bytes())
        return await asked(self, batch)

    monkeypatch.setattr(EncodingWorker, "_asked", looked_at)
    encode(series)
    assert [b"MALLOC_TRIM_THRESHOLD_=" in one for one in environments] == [True]


def test_one_that_dies_of_a_batch_is_told_apart(series: Series, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = EncodingWorker._asked

    async def killed(self: EncodingWorker, batch: EncodingBatch) -> object:
        assert self._process is not None
        self._process.kill()
        return await asked(self, batch)

    monkeypatch.setattr(EncodingWorker, "_asked", killed)
    before = series.store.segment_files()
    with pytest.raises(EncoderDied):
        encode(series)
    assert series.store.segment_files() == before


def test_one_that_cannot_be_started_is_nobodys_fault(series: Series, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_worker.sys, "executable", "/bin/true")
    with pytest.raises(Unavailable) as caught:
        encode(series)
    assert not isinstance(caught.value, EncoderDied) and "started" in str(caught.value)


def test_an_idx_that_cannot_be_read_leaves_nothing(series: Series, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(disk: Disk, number: int) -> SegmentIndex:
        assert disk.exists(segment_paths(number)[1])
        raise Corrupt("an .idx does not match its CRC-64")

    monkeypatch.setattr(encoding_worker, "read_idx", unreadable)
    before = series.store.segment_files()
    with pytest.raises(Corrupt):
        encode(series)
    assert series.store.segment_files() == before
    assert not encoded_chunks(series, 0)
