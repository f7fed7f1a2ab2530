"""safetensors: what the library writes is found; what contradicts itself becomes damage."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from .conftest import ParseBytes


def build(header: object, payload: bytes = b"", pad: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    return struct.pack("<Q", len(text)) + text + payload


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_what_the_library_writes(parse_bytes: ParseBytes) -> None:
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.ones(7, np.float16),
        "empty": np.zeros((0, 4), np.int64),
    }
    content = safetensors.numpy.save(arrays, {"format": "pt"})
    layout = parse_bytes(content)
    assert layout is not None and layout.format == "safetensors" and layout.damage is None
    assert {(t.name, t.dtype, t.shape) for t in layout.tensors} == {("b", "F32", (2, 3)), ("a", "F16", (7,))}
    for tensor in layout.tensors:
        assert content[tensor.offset : tensor.offset + tensor.length] == arrays[tensor.name].tobytes()


def test_torch_dtypes(parse_bytes: ParseBytes) -> None:
    import safetensors.torch
    import torch

    content = safetensors.torch.save({"w": torch.zeros(3, 5, dtype=torch.bfloat16)})
    layout = parse_bytes(content, "model.safetensors")
    assert layout is not None
    assert [(t.dtype, t.shape, t.length) for t in layout.tensors] == [("BF16", (3, 5), 30)]


def test_sub_byte_types(parse_bytes: ParseBytes) -> None:
    layout = parse_bytes(build({"x": entry("F4", [2, 3], 0, 3), "y": entry("F6_E2M3", [4], 3, 6)}, bytes(6)))
    assert layout is not None and layout.damage is None
    assert [(t.dtype, t.length) for t in layout.tensors] == [("F4", 3), ("F6_E2M3", 3)]


def test_truncated_at_every_97th_byte(parse_bytes: ParseBytes) -> None:
    content = safetensors.numpy.save({f"layer.{i}": np.zeros(100, np.float32) for i in range(20)})
    for length in range(9, len(content), 97):
        layout = parse_bytes(content[:length], "model.safetensors")
        assert layout is not None and layout.damage is not None and "truncated" in layout.damage
    assert parse_bytes(content[:4000]) is not None


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (build({"x": entry("U8", [4], 0, 4)}, bytes(5)), "1 trailing bytes"),
        (build({"x": entry("U8", [4], 1, 5)}, bytes(5)), "no tensor covers"),
        (build({"x": entry("U8", [4], 0, 4), "y": entry("U8", [4], 2, 6)}, bytes(6)), "overlaps"),
        (build({"x": entry("F32", [4], 0, 4)}, bytes(4)), "do not make 4 bytes"),
        (build({"x": entry("U8", [4], 4, 0)}, bytes(4)), "ends before it begins"),
        (build({"x": entry("U8", [-4], 0, 4)}, bytes(4)), "lacks dtype"),
        (build({"x": entry("U8", [True], 0, 1)}, bytes(1)), "lacks dtype"),
        (build({"x": 3}, bytes(4)), "lacks dtype"),
        (build(b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1e1]}}', bytes(4)), "lacks dtype"),
        (build(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1"), "twice"),
        (build(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', b"1"), "twice"),
        (build(b'{"a":' + b"[" * 200_000), "not JSON"),
        (build(b"{" + b"9" * 100_000 + b"}"), "not JSON"),
        (build(b'{"a":' + b"9" * 10_000 + b"}"), "not JSON"),
        (build('{"ä":{}}'.encode("utf-16-le")), "not JSON"),
        (struct.pack("<Q", 50_000_000) + b'{"a"', "truncated"),
    ],
)
def test_contradictions_are_damage(parse_bytes: ParseBytes, content: bytes, why: str) -> None:
    layout = parse_bytes(content)
    assert layout is not None and layout.damage is not None and why in layout.damage


def test_a_header_beyond_the_bound_is_opaque(parse_bytes: ParseBytes) -> None:
    """It may be right, so it is not called damaged."""
    assert parse_bytes(build(b'{"a":[' + b"[]," * 1_000_000 + b"[]]}")) is None
    assert parse_bytes(build(b'{"a":"' + b"x" * 40_000_000 + b'"}')) is None


def test_names_become_bounded_utf8(parse_bytes: ParseBytes) -> None:
    content = build(b'{"\\ud800' + b"n" * 5000 + b'":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1")
    layout = parse_bytes(content)
    assert layout is not None and len(layout.tensors[0].name) < 2000


def test_not_a_header(parse_bytes: ParseBytes) -> None:
    assert parse_bytes(b"x" * 100) is None
    assert parse_bytes(struct.pack("<Q", 200_000_000) + b"{}" + bytes(50)) is None
    named = parse_bytes(b"x" * 100, "dir/model.safetensors")
    assert named is not None and named.damage is not None
    for blank in (b"", bytes(4096)):
        layout = parse_bytes(blank, "model.safetensors")
        assert layout is not None and layout.damage is not None
        assert parse_bytes(blank, "notes.txt") is None


offsets = st.one_of(st.integers(-3, 40), st.integers(2**62, 2**66))
json_entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "F4", "nonsense", 3]),
        "shape": st.one_of(st.lists(offsets, max_size=4), st.none()),
        "data_offsets": st.lists(offsets, min_size=1, max_size=3),
    },
)


@given(st.dictionaries(st.text(max_size=3), json_entries, max_size=6), st.integers(0, 40), st.integers(0, 9))
def test_any_header_is_a_layout(
    parse_bytes: ParseBytes, header: dict[str, Any], payload: int, pad: int
) -> None:
    layout = parse_bytes(build(header, bytes(payload), pad))
    assert layout is None or layout.format == "safetensors"
