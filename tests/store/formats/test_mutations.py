"""One invariant for every format: whatever bytes change, the answer is None or a valid layout."""

from __future__ import annotations

import io
import struct
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .conftest import ParseBytes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@cache
def originals() -> dict[str, tuple[bytes, dict[str, bytes]]]:
    """A small real file of each format, with the siblings that it is parsed with."""
    import safetensors.torch
    import torch

    state = {"model": {"w": torch.zeros(50, 7), "b": torch.ones(7, dtype=torch.bfloat16)}, "step": 3}
    new, old = io.BytesIO(), io.BytesIO()
    torch.save(state, new)
    torch.save(state, old, _use_new_zipfile_serialization=False)
    # Zips of a DCP shard lie one behind the other.
    row = new.getvalue() * 3
    head = struct.pack("<4sIQQ", b"GGUF", 3, 1, 1) + struct.pack("<Q1sIQ2s", 1, b"k", 8, 2, b"vv")
    gguf = head + struct.pack("<Q1sIQIQ", 1, b"t", 1, 8, 0, 0) + bytes(100)
    return {
        "x.safetensors": (safetensors.torch.save(state["model"]), {}),
        "x.pt": (new.getvalue(), {}),
        "old.pt": (old.getvalue(), {}),
        "__0_0.distcp": (row, {}),
        "x.gguf": (gguf, {}),
    }


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_changed_bytes(parse_bytes: ParseBytes, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(originals())))
    content, siblings = originals()[name]
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        piece = data.draw(
            st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8), st.just(bytes(8)))
        )
        changed[at : at + len(piece)] = piece
    parse_bytes(bytes(changed), name, siblings)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_cut_and_joined_files(parse_bytes: ParseBytes, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(originals()))
    first, second = (originals()[data.draw(names)][0] for _ in range(2))
    cut = data.draw(st.integers(0, len(first)))
    skip = data.draw(st.integers(0, len(second)))
    parse_bytes(first[:cut] + second[skip:], data.draw(names), {})


@given(
    st.binary(max_size=300), st.sampled_from(["x.pt", ".metadata", "x.safetensors", "__0_0.distcp", "log"])
)
def test_any_bytes(parse_bytes: ParseBytes, content: bytes, name: str) -> None:
    parse_bytes(content, name, {".metadata": content})


@pytest.mark.parametrize(
    "magic", [b"PK\x03\x04", b"GGUF\3\0\0\0", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."]
)
def test_a_magic_alone(parse_bytes: ParseBytes, magic: bytes) -> None:
    for tail in (b"", bytes(200), b"\xff" * 200, b"PK\x05\x06" * 300):
        parse_bytes(magic + tail, "x.pt")
