"""torch.save files, zip and legacy: every storage is found where torch put it, named as in the dict."""

from __future__ import annotations

import io
import struct
import zipfile
from typing import Any

import pytest

from ckptfs.store.formats import Layout, probe_format

from .conftest import ParseBytes


def saved(thing: object, *, legacy: bool = False) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(thing, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def model_state() -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64, dtype=torch.bfloat16))
    weight = model[0].weight
    return {
        "model": model.state_dict(),
        "tied": weight,
        "optimizer": {"step": torch.tensor(3.0), "v": [torch.randn(10), torch.randn(4, 4)[1:]]},
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "f8": torch.zeros(5, dtype=torch.float8_e4m3fn),
        "u16": torch.zeros(5, dtype=torch.uint16),
        "transposed": torch.randn(4, 6).t(),
        "complex": torch.zeros(2, dtype=torch.complex64),
        "empty": torch.empty(0),
        "epoch": 3,
        "text": "hello",
    }


EXPECTED = {
    "model.0.weight": ("F32", (128, 64)),
    "model.0.bias": ("F32", (128,)),
    "model.1.weight": ("BF16", (64, 128)),
    "model.1.bias": ("BF16", (64,)),
    "optimizer.step": ("F32", ()),
    "optimizer.v.0": ("F32", (10,)),
    "optimizer.v.1": ("F32", (16,)),
    "parameter": ("F32", (3,)),
    "f8": ("F8_E4M3", (5,)),
    "u16": ("U16", (5,)),
    "transposed": ("F32", (24,)),
    "complex": ("C64", (2,)),
}


def assert_expected(content: bytes, state: dict[str, Any], layout: Layout | None) -> None:
    import torch

    assert layout is not None and layout.damage is None
    assert {t.name: (t.dtype, t.shape) for t in layout.tensors} == EXPECTED
    stored = {t.name: content[t.offset : t.offset + t.length] for t in layout.tensors}
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert stored[f"model.{name}"] == state["model"][name].view(torch.uint8).numpy().tobytes()
    assert stored["optimizer.v.0"] == state["optimizer"]["v"][0].numpy().tobytes()


@pytest.mark.parametrize("legacy", [False, True])
def test_a_training_state(parse_bytes: ParseBytes, legacy: bool) -> None:
    state = model_state()
    content = saved(state, legacy=legacy)
    layout = parse_bytes(content, "step_100.pt")
    assert_expected(content, state, layout)
    expected = "torch-legacy" if legacy else "torch-zip"
    assert layout is not None and layout.format == expected
    assert probe_format(content[:64], "x") == expected


def test_the_stem_is_no_part_of_a_name(parse_bytes: ParseBytes, tmp_path: Any) -> None:
    import torch

    class Unwalkable:
        def __reduce_ex__(self, protocol: int) -> Any:
            return complex, (1.0, 2.0)

    for stem in ("epoch=1-step=200", "a" * 90):
        path = tmp_path / f"{stem}.ckpt"
        torch.save({"w": torch.zeros(8), "z": Unwalkable()}, path)
        content = path.read_bytes()
        layout = parse_bytes(content, path.name)
        assert layout is not None and [t.name for t in layout.tensors] == ["w"]
        assert probe_format(content[:64], path.name) == "torch-zip"


def test_a_pickled_module(parse_bytes: ParseBytes) -> None:
    import torch

    layout = parse_bytes(saved(torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU())), "model.pt")
    assert layout is not None
    assert {t.name: t.shape for t in layout.tensors} == {"0.weight": (5, 4), "0.bias": (5,)}


def test_a_tensor_and_a_list_have_names(parse_bytes: ParseBytes) -> None:
    import torch

    alone = parse_bytes(saved(torch.zeros(4)))
    assert alone is not None and [t.name for t in alone.tensors] == ["data/0"]
    several = parse_bytes(saved([torch.zeros(4), (torch.ones(2),)]))
    assert several is not None and [t.name for t in several.tensors] == ["0", "1.0"]


def test_equal_names_are_told_apart(parse_bytes: ParseBytes) -> None:
    import torch

    layout = parse_bytes(saved({"a.b": torch.zeros(4), "a": {"b": torch.ones(4)}}))
    assert layout is not None
    first, second = layout.tensors
    assert (first.name, second.name) == ("a.b", f"a.b@{second.offset}")


def rewritten(content: bytes, pickled: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    """The same archive with another data.pkl."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w") as new:
        for one in old.infolist():
            if one.filename.endswith("/data.pkl"):
                new.writestr(zipfile.ZipInfo(one.filename), pickled, method)
            else:
                new.writestr(zipfile.ZipInfo(one.filename), old.read(one))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "pickled",
    [b"", b"\x80\x02.", b"cos\nsystem\n(X\x02\0\0\0idtR.", b"\x80\x02" + b"(" * 10_000, b"\xff\xff"],
)
def test_without_a_walkable_pickle_storages_keep_their_record_names(
    parse_bytes: ParseBytes, pickled: bytes
) -> None:
    import torch

    layout = parse_bytes(rewritten(saved({"w": torch.zeros(4), "x": torch.zeros(9)}), pickled))
    assert layout is not None
    assert [(t.name, t.length, t.dtype) for t in layout.tensors] == [
        ("data/0", 16, "U8"),
        ("data/1", 36, "U8"),
    ]


def test_nothing_is_inflated(parse_bytes: ParseBytes) -> None:
    """A record that would inflate to 80 MB is left alone, and a compressed pickle is not read."""
    import torch

    content = rewritten(saved({"w": torch.zeros(4)}), bytes(80_000_000), zipfile.ZIP_DEFLATED)
    assert parse_bytes(content, "bomb.pt") is None


def test_other_zip_files_are_opaque(parse_bytes: ParseBytes) -> None:
    import numpy as np

    buffer = io.BytesIO()
    np.savez(buffer, a=np.zeros(9))
    assert parse_bytes(buffer.getvalue(), "a.npz") is None
    assert probe_format(buffer.getvalue()[:64], "a.npz") is None


@pytest.mark.parametrize("legacy", [False, True])
def test_truncated_at_every_97th_byte(parse_bytes: ParseBytes, legacy: bool) -> None:
    content = saved(model_state(), legacy=legacy)
    for length in range(97, len(content), 97):
        layout = parse_bytes(content[:length], "step_100.pt")
        assert layout is not None and layout.damage is not None, length
    for extra in (b"\0", b"x" * 5000):
        layout = parse_bytes(content + extra, "step_100.pt")
        assert layout is not None and layout.damage is not None and "trailing" in layout.damage
        assert len(layout.tensors) == len(EXPECTED)


def test_a_legacy_file_whose_pickles_are_long(parse_bytes: ParseBytes) -> None:
    import torch

    state = {"vocabulary": [f"token {i}" for i in range(120_000)], "w": torch.arange(6.0)}
    content = saved(state, legacy=True)
    layout = parse_bytes(content)
    assert layout is not None and layout.damage is None
    assert [(t.name, t.shape) for t in layout.tensors] == [("w", (6,))]


def test_local_headers_that_lie(parse_bytes: ParseBytes) -> None:
    import torch

    content = bytearray(saved({"w": torch.zeros(400)}))
    at = content.index(b"PK\x03\x04", content.index(b"data/0") - 60)
    struct.pack_into("<H", content, at + 28, 0xFFFF)
    layout = parse_bytes(bytes(content), "x.pt")
    assert layout is not None and layout.damage is not None and layout.tensors == ()


def test_records_that_overlap(parse_bytes: ParseBytes) -> None:
    """Two directory entries that point at one local header: one extent, and damage."""
    import torch

    content = bytearray(saved({"w": torch.zeros(400), "v": torch.zeros(400)}))
    directory = content.index(b"PK\x01\x02")
    first = content.index(b"archive/data/0", directory) - 46
    second = content.index(b"archive/data/1", directory) - 46
    content[second + 42 : second + 46] = content[first + 42 : first + 46]
    layout = parse_bytes(bytes(content), "x.pt")
    assert layout is not None and layout.damage is not None and not layout.tensors
