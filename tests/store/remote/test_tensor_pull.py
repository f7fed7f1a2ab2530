"""Single tensors come from a remote, with little else."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from bytes_reader import BytesReader
from dcp_files import dcp_save
from faultbucket import MemoryBucket
from saved_store import SavedStore, Tree
from small_store import random_bytes, safetensors

from ckptfs.store.errors import Conflict, Corrupt, InvalidRequest, NotFound
from ckptfs.store.formats import parse
from ckptfs.store.history import State, VersionRecord
from ckptfs.store.remote.copied import CopiedUnits
from ckptfs.store.remote.landing import Landing
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.push import Pusher
from ckptfs.store.remote.tensor_pull import PulledTensors, TensorPuller, Wanted
from ckptfs.store.signing import SigningKey

KEY = SigningKey(b"k" * 32)
LARGE, SMALL, TINY = random_bytes(1_000_000, 1), random_bytes(3_000_000, 2), random_bytes(1000, 3)
MODEL = safetensors({"large": LARGE, "small": SMALL, "tiny": TINY})


async def copied(path: Path, tree: Tree, remote: Remote) -> VersionRecord:
    store = SavedStore(path, key=KEY)
    record = await store.publish(b"run", tree, step=5)
    copied = CopiedUnits(store.index, "x")
    await Pusher(remote, store.disk, store.segments, store.histories, copied, "node").push(record.unit)
    store.close()
    return record


async def pull(
    store: SavedStore,
    remote: Remote,
    source: VersionRecord,
    inner: Sequence[bytes],
    *tensors: str,
    name: bytes = b"probe",
) -> PulledTensors:
    landing = Landing(remote, store.index, store.segments, store.ingest, store.histories, os.urandom)
    wanted = Wanted(source, tuple(inner), tensors, name, b"t.safetensors", {"of": "there"})
    return await TensorPuller(landing).pull(wanted)


def read(store: SavedStore, found: PulledTensors) -> dict[str, bytes]:
    """The tensors of the file that came."""
    ((path, content),) = store.read_version(found.pulled.record).items()
    assert path == b"t.safetensors" and len(content) == found.size_bytes
    layout = parse(BytesReader(content), "t.safetensors")
    assert layout is not None and layout.damage is None
    return {one.name: content[one.offset : one.end] for one in layout.tensors}


def test_only_what_it_needs_is_fetched(tmp_path: Path) -> None:
    async def main() -> None:
        remote = Remote(MemoryBucket())
        source = await copied(tmp_path / "a", {b"ck": {b"model.safetensors": MODEL}}, remote)
        store = SavedStore(tmp_path / "b", key=KEY)
        found = await pull(store, remote, source, [b"ck", b"model.safetensors"], "large")
        assert read(store, found) == {"large": LARGE}
        assert len(LARGE) <= found.pulled.fetched_bytes < len(LARGE) + 20_000
        (one,) = found.tensors
        assert (one.path, one.part.dtype, one.part.length) == ("ck/model.safetensors", "F32", len(LARGE))
        record = found.pulled.record
        assert (record.state, record.steps, record.step, record.origin) == (State.PARTIAL, (), 5, "pull")
        assert record.missing == ("only large was pulled of version 1",)
        tiny = await pull(store, remote, source, [b"ck", b"model.safetensors"], "tiny", name=b"other")
        assert read(store, tiny) == {"tiny": TINY} and tiny.pulled.fetched_bytes < 20_000
        again = await pull(store, remote, source, [], "large", "tiny", name=b"both")
        assert read(store, again) == {"large": LARGE, "tiny": TINY}
        assert again.pulled.fetched_chunks == 0, "all of it was here"
        store.close()

    trio.run(main)


def test_an_index_tells_which_file(tmp_path: Path) -> None:
    async def main() -> None:
        remote = Remote(MemoryBucket())
        shards = {
            f"m-{at}.safetensors".encode(): safetensors({f"w{at}": random_bytes(500_000, at)})
            for at in range(4)
        }
        weights = {f"w{at}": f"m-{at}.safetensors" for at in range(4)}
        index = json.dumps({"weight_map": weights}).encode()
        tree: Tree = {b"ck": {**shards, b"model.safetensors.index.json": index}}
        source = await copied(tmp_path / "a", tree, remote)
        store = SavedStore(tmp_path / "b", key=KEY)
        found = await pull(store, remote, source, [b"ck"], "w2")
        assert read(store, found) == {"w2": random_bytes(500_000, 2)}
        assert [one.path for one in found.tensors] == ["ck/m-2.safetensors"]
        # Two trees; recipe and chunk of the index; recipe, header and two chunks of the shard.
        assert found.pulled.fetched_chunks == 8
        store.close()

    trio.run(main)


def test_what_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        remote = Remote(MemoryBucket())
        tree: Tree = {
            b"a": {b"m.safetensors": MODEL},
            b"b": {b"m.safetensors": safetensors({"large": TINY})},
            b"notes.txt": b"text",
        }
        source = await copied(tmp_path / "a", tree, remote)
        store = SavedStore(tmp_path / "b", key=KEY)
        with pytest.raises(InvalidRequest, match=r"several files hold a tensor 'large'.*a/m.*, b/m"):
            await pull(store, remote, source, [], "large")
        with pytest.raises(NotFound, match=r"no tensor 'lerge'; the names that are nearest: large"):
            await pull(store, remote, source, [b"a"], "lerge")
        with pytest.raises(NotFound, match="nothing there is a file with tensors"):
            await pull(store, remote, source, [b"notes.txt"], "x")
        with pytest.raises(NotFound, match="has no a/x"):
            await pull(store, remote, source, [b"a", b"x"], "x")
        assert store.histories.unit_named(b"probe") is None
        assert read(store, await pull(store, remote, source, [b"b"], "large")) == {"large": TINY}
        unit = store.histories.unit_named(b"probe")
        assert unit is not None
        await store.publish(b"live", {b"f": b""})
        with pytest.raises(Conflict, match="live is live here"):
            await pull(store, remote, source, [b"b"], "large", name=b"live")
        store.close()

    trio.run(main)


def test_a_damaged_chunk_of_it_is_named_and_of_others_is_no_matter(tmp_path: Path) -> None:
    bucket = MemoryBucket()

    async def main() -> None:
        remote = Remote(bucket)
        source = await copied(tmp_path / "a", {b"m.safetensors": MODEL}, remote)
        (pack,) = bucket.keys("packs")
        at = bucket.objects[pack].payload.index(LARGE[500_000:500_100])
        bucket.flip(pack, 8 * at)
        store = SavedStore(tmp_path / "b", key=KEY)
        with pytest.raises(Corrupt, match=pack):
            await pull(store, remote, source, [], "large")
        assert store.histories.unit_named(b"probe") is None
        assert read(store, await pull(store, remote, source, [], "small")) == {"small": SMALL}
        store.close()

    trio.run(main)


def test_parts_of_a_sharded_tensor_come_together(tmp_path: Path) -> None:
    """DCP: each rank's file holds some rows; the first of them are not taken for the whole."""
    import torch

    whole = torch.arange(40_000, dtype=torch.float32).reshape(400, 100)
    tree = dcp_save({"w": [(0, whole[:150]), (150, whole[150:])], "other": [(0, whole * 2)]})

    async def main() -> None:
        remote = Remote(MemoryBucket())
        source = await copied(tmp_path / "a", {b"ck": tree}, remote)
        store = SavedStore(tmp_path / "b", key=KEY)
        found = await pull(store, remote, source, [b"ck"], "w")
        rows = [whole[:150].numpy().tobytes(), whole[150:].numpy().tobytes()]
        assert read(store, found) == {"w[0,0]": rows[0], "w[150,0]": rows[1]}
        assert [one.part.shape for one in found.tensors] == [(150, 100), (250, 100)]
        assert [one.path for one in found.tensors] == ["ck/__0_0.distcp", "ck/__1_0.distcp"]
        alone = await pull(store, remote, source, [b"ck"], "w[150,0]", name=b"alone")
        assert read(store, alone) == {"w[150,0]": rows[1]}
        other = await pull(store, remote, source, [b"ck"], "other", name=b"other")
        assert read(store, other) == {"other": (whole * 2).numpy().tobytes()}
        store.close()

    trio.run(main)
