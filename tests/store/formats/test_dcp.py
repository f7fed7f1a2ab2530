"""Torch distributed checkpoints: shards with and without their `.metadata`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bytes_reader import BytesReader

from ckptfs.store.formats import dcp_metadata, parse_content, probe_format

from .conftest import ParseBytes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_dcp(path: Path, state: dict[str, Any]) -> dict[str, bytes]:
    import torch.distributed.checkpoint as checkpoint

    checkpoint.save(state, checkpoint_id=path, no_dist=True)
    return {one.name: one.read_bytes() for one in path.iterdir()}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    import torch

    state = {
        "model": {"w": torch.arange(5000.0).reshape(50, 100), "b": torch.ones(7, dtype=torch.bfloat16)},
        "epoch": 3,
        "log": ["x" * 300] * 20,
    }
    return save_dcp(tmp_path_factory.mktemp("dcp") / "step_1", state)


def test_names_come_from_metadata(parse_bytes: ParseBytes, files: dict[str, bytes]) -> None:
    shard = files["__0_0.distcp"]
    layout = parse_bytes(shard, "step_1/__0_0.distcp", files)
    assert layout is not None and layout.format == "dcp" and layout.damage is None
    assert {(t.name, t.dtype, t.shape) for t in layout.tensors} == {
        ("model.w", "F32", (50, 100)),
        ("model.b", "BF16", (7,)),
    }
    weight = next(t for t in layout.tensors if t.name == "model.w")
    import numpy as np

    stored = np.frombuffer(shard[weight.offset : weight.offset + weight.length], np.float32)
    assert stored.tolist() == list(range(5000))


def test_without_metadata_the_extents_are_the_same(parse_bytes: ParseBytes, files: dict[str, bytes]) -> None:
    shard = files["__0_0.distcp"]
    named = parse_bytes(shard, "__0_0.distcp", files)
    bare = parse_bytes(shard, "__0_0.distcp", {})
    assert named is not None and bare is not None and bare.damage is None
    assert [(t.offset, t.length, t.dtype, t.shape) for t in bare.tensors] == [
        (t.offset, t.length, t.dtype, t.shape) for t in named.tensors
    ]


def test_by_its_content_alone_a_shard_is_the_same_under_any_name(
    parse_bytes: ParseBytes, files: dict[str, bytes]
) -> None:
    shard = files["__0_0.distcp"]
    named, bare = parse_bytes(shard, "__0_0.distcp", files), parse_content(BytesReader(shard))
    assert named is not None and bare is not None and bare.damage is None
    extents = [(t.offset, t.length, t.dtype) for t in named.tensors]
    assert [(t.offset, t.length, t.dtype) for t in bare.tensors] == extents
    for damaged in (shard[100:], b"x" * 100 + shard, shard[:-1], shard[:-1000], shard + b"x"):
        layout = parse_content(BytesReader(damaged))
        assert layout is not None and layout.damage is not None
    assert parse_content(BytesReader(files[".metadata"])) is None


def test_probes(files: dict[str, bytes]) -> None:
    assert probe_format(files["__0_0.distcp"][:64], "a/__0_0.distcp") == "dcp"
    assert probe_format(files[".metadata"][:64], "a/.metadata") == "dcp"
    assert probe_format(b"", "__0_0.distcp") == "dcp"
    assert probe_format(b"step 1 loss 3.2", "train.log") is None
    assert probe_format(b"", "train.log") is None


def test_truncation(parse_bytes: ParseBytes, files: dict[str, bytes]) -> None:
    shard = files["__0_0.distcp"]
    for length in range(97, len(shard), 97):
        with_metadata = parse_bytes(shard[:length], "__0_0.distcp", files)
        assert with_metadata is not None and "truncated" in str(with_metadata.damage)
        without = parse_bytes(shard[:length], "__0_0.distcp", {})
        ends_between_archives = without is not None and without.damage is None
        assert without is not None and (ends_between_archives is (length in _boundaries(files)))
    longer = parse_bytes(shard + b"x", "__0_0.distcp", files)
    assert longer is not None and longer.damage is not None
    for length in range(97, len(files[".metadata"]), 97):
        layout = parse_bytes(files[".metadata"][:length], ".metadata")
        assert layout is not None and layout.damage is not None
    whole = parse_bytes(files[".metadata"], ".metadata")
    assert whole is not None and whole.damage is None and whole.tensors == ()


def _boundaries(files: dict[str, bytes]) -> set[int]:
    shards = dcp_metadata._walked(files[".metadata"])
    assert shards is not None
    return {extent.offset for extent in shards.extents["__0_0.distcp"]}


def test_chunks_of_a_tensor_carry_their_offset(tmp_path: Path) -> None:
    """The metadata of a sharded tensor, as several ranks write it."""
    import pickle

    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    storage = {
        MetadataIndex("w", torch.Size([row * 10, 0])): _StorageInfo(f"__{row}_0.distcp", 5, 100 + row)
        for row in range(3)
    }
    pickled = pickle.dumps(Metadata({}, None, storage))
    shards = dcp_metadata._walked(pickled)
    assert shards is not None and shards.exact
    assert [shards.extents[f"__{row}_0.distcp"][0] for row in range(3)] == [
        dcp_metadata.Extent(5, 100, "w"),
        dcp_metadata.Extent(5, 101, "w[10,0]"),
        dcp_metadata.Extent(5, 102, "w[20,0]"),
    ]
    searched = dcp_metadata._searched(BytesReader(b"x" * (4 << 20) + pickled))
    assert not searched.exact and set(searched.extents) == set(shards.extents)


def test_safetensors_shards(parse_bytes: ParseBytes) -> None:
    import safetensors.torch
    import torch

    content = safetensors.torch.save({"w": torch.zeros(9)})
    layout = parse_bytes(content, "__0_0.distcp", {})
    assert layout is not None and layout.format == "safetensors"
