"""GGUF: hand-made files, whole and hostile."""

from __future__ import annotations

import struct

import pytest

from .conftest import ParseBytes


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def row(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def build(pairs: list[bytes], rows: list[bytes], payload: bytes, alignment: int = 32) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(rows), len(pairs)) + b"".join(pairs) + b"".join(rows)
    return head + bytes(-len(head) % alignment) + payload


PAIRS = [
    pair(b"general.architecture", 8, string(b"llama")),
    pair(b"tokens", 9, struct.pack("<IQ", 8, 3) + string(b"a") + string(b"bc") + string(b"")),
    pair(b"scores", 9, struct.pack("<IQ", 6, 3) + bytes(12)),
    pair(b"nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 4, 2) + bytes(8)),
    pair(b"flag", 7, b"\1"),
]
ROWS = [
    row(b"token_embd.weight", (64, 4), 0, 0),
    row(b"blk.0.attn_q.weight", (256, 2), 12, 1024),
    row(b"norm", (10,), 1, 1024 + 288),
]
WHOLE = build(PAIRS, ROWS, bytes(1024 + 288 + 32))


def test_plain_and_quantised_tensors(parse_bytes: ParseBytes) -> None:
    layout = parse_bytes(WHOLE, "model.gguf")
    assert layout is not None and layout.format == "gguf" and layout.damage is None
    start = layout.tensors[0].offset
    assert start % 32 == 0
    assert [(t.name, t.offset - start, t.length, t.dtype, t.shape) for t in layout.tensors] == [
        ("token_embd.weight", 0, 1024, "F32", (4, 64)),
        ("blk.0.attn_q.weight", 1024, 288, "U8", (288,)),
        ("norm", 1312, 20, "F16", (10,)),
    ]


def test_alignment_is_read(parse_bytes: ParseBytes) -> None:
    aligned = [*PAIRS, pair(b"general.alignment", 4, struct.pack("<I", 4096))]
    layout = parse_bytes(build(aligned, ROWS[:1], bytes(4096), 4096))
    assert layout is not None and layout.damage is None and layout.tensors[0].offset == 4096


def test_an_unknown_type_ends_where_the_next_tensor_begins(parse_bytes: ParseBytes) -> None:
    rows = [row(b"new", (64,), 77, 0), row(b"old", (8,), 0, 64)]
    layout = parse_bytes(build([], rows, bytes(96)))
    assert layout is not None
    assert [(t.name, t.length, t.dtype) for t in layout.tensors] == [("new", 64, "U8"), ("old", 32, "F32")]


def test_truncated_at_every_97th_byte(parse_bytes: ParseBytes) -> None:
    for length in range(8, len(WHOLE) - 32, 97):
        layout = parse_bytes(WHOLE[:length], "model.gguf")
        assert layout is not None and "truncated" in str(layout.damage)
    longer = parse_bytes(WHOLE + bytes(100))
    assert longer is not None and "trailing" in str(longer.damage)


HUGE = struct.pack("<Q", 2**63)


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<4sIQQ", b"GGUF", 3, 2**63, 0),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**63) + bytes(1000),
        build([pair(b"k", 9, struct.pack("<I", 8) + HUGE)], [], bytes(3000)),
        build([pair(b"k", 9, struct.pack("<I", 4) + HUGE)], [], bytes(3000)),
        build([pair(b"k", 9, struct.pack("<IQ", 9, 1) * 50)], [], bytes(3000)),
        build([pair(b"k", 99, b"")], [], b""),
        build([string(b"")[:4] + b"\xff" * 8], [], bytes(99)),
        build([], [row(b"x", (2**63, 2**63), 0, 0)], bytes(99)),
        build([], [row(b"x", (4,), 0, 2**63)], bytes(99)),
        build([], [row(b"x", (4,), 0, 0), row(b"y", (4,), 0, 8)], bytes(99)),
        build([], [string(b"x") + struct.pack("<I", 2**31)], bytes(99)),
        build([pair(b"general.alignment", 4, struct.pack("<I", 0))], ROWS, bytes(99)),
    ],
)
def test_hostile_headers_are_damage(parse_bytes: ParseBytes, content: bytes) -> None:
    layout = parse_bytes(content, "model.gguf")
    assert layout is not None and layout.damage is not None


def test_other_versions_are_opaque(parse_bytes: ParseBytes) -> None:
    assert parse_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(99)) is None
    assert parse_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(99)) is None
