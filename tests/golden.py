"""Golden bytes (tests/vectors/*.json) and broken bytes: what tests of encodings share.

The one rule: a vector is never made anew. It says what some version of ckptfs wrote, so every later one
must read it.
"""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st

from ckptfs.store.dagcbor import Link
from ckptfs.store.ids import cid_text

VECTORS = Path(__file__).parent / "vectors"


def vectors(name: str) -> list[dict[str, Any]]:
    """The vectors of one file."""
    loaded = json.loads((VECTORS / f"{name}.json").read_text())
    assert isinstance(loaded, list) and loaded
    return loaded


def plain(value: object) -> Any:
    """`value` as JSON shows it: bytes as {"hex": …}, CIDs as {"cid": …}, records as their fields."""
    match value:
        case bytes():
            shown: Any = {"hex": value.hex()}
        case Link():
            shown = {"cid": cid_text(value.digest, value.codec)}
        case Enum():
            shown = value.value
        case tuple() | list():
            shown = [plain(item) for item in value]
        case dict():
            shown = {key: plain(item) for key, item in value.items()}
        case msgspec.Struct():
            shown = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        case _ if dataclasses.is_dataclass(value):
            shown = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        case _:
            shown = value
    return shown


@st.composite
def broken(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bytes that may once have been right: flipped, cut, spliced, repeated; sometimes just any bytes."""
    encoded = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(encoded)))
        match draw(st.sampled_from(["flip", "cut", "insert", "repeat", "any", "length"])):
            case "flip" if at < len(encoded):
                encoded[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del encoded[at : at + draw(st.integers(1, 50))]
            case "insert":
                encoded[at:at] = draw(st.binary(max_size=12))
            case "repeat":
                encoded[at:at] = encoded[max(0, at - draw(st.integers(1, 50))) : at]
            case "any":
                encoded = bytearray(draw(st.binary(max_size=200)))
            case "length":
                encoded[at : at + 8] = draw(st.sampled_from([b"\xff" * 8, b"\x7f" + b"\xff" * 7, bytes(8)]))
    return bytes(encoded)
