"""From the plain bytes of a chunk to the smallest of its encodings.

One rule: what is returned decodes to the chunk, and nothing that is larger than the chunk is returned. Which
encodings are made at all is guessed from samples: making all of them would take four times as long.

Source: FORMAT.md, "Encoded chunks"; the measurements are those of tests/benchmarks/codecs.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ckptfs.store.codecs import context
from ckptfs.store.codecs.elements import FRACTION_BITS, PARAMETERS, WIDTH, Element, element_of, is_integer
from ckptfs.store.codecs.encoded_chunk import Header, encode_chunk
from ckptfs.store.codecs.entropy import Coder
from ckptfs.store.codecs.kernels import KERNELS
from ckptfs.store.codecs.planes_twin import SAMPLE_RUN, SAMPLE_STRIDE
from ckptfs.store.encoding_level import Level
from ckptfs.store.hashing import Buffer
from ckptfs.store.ids import ChunkId
from ckptfs.store.segment_format import MAX_DEPTH, Codec

_RAW_ABOVE: Final = 0.985
"""A plane that does not get smaller than this stays as it is: it is decoded for nothing then."""
_CONTEXT_BELOW: Final = 0.99
"""Codec 5 takes three to six times as long to read as planes: not worth it for less than this."""
_REPEATS_BYTES: Final = 4096
"""zstd's search is tried on tensors in which one of so many bytes begins a word that was met before."""
_SAMPLED_BYTES: Final = 1 << 20
"""What a parent is chosen by; chunks of tensors are shorter."""
_COUNTS: Final = np.arange(_SAMPLED_BYTES // (SAMPLE_STRIDE // SAMPLE_RUN) + 1, dtype=np.float32)
_COUNTS[1:] *= np.log2(_COUNTS[1:])


@dataclass(frozen=True, slots=True)
class Parent:
    """A chunk that another may be encoded against: its id, its plain bytes, and the depth of its encoding."""

    chunk: ChunkId
    payload: Buffer
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Encoded:
    """What to store for a chunk: `stored` is the chunk itself where the codec is RAW."""

    codec: Codec
    stored: Buffer
    depth: int = 0
    parents: tuple[ChunkId, ...] = ()


def encode(
    payload: Buffer,
    dtype: str | None,
    parent: Parent | None,
    cast_of: Sequence[Parent],
    coder: Coder,
    level: Level = "fast",
) -> Encoded:
    """The smallest encoding found of a chunk of values of `dtype` (None: of anything).

    `parent` is the same part of the same tensor in another save, `cast_of` the float32 chunks (at most two)
    that a bfloat16 chunk may be the cast of. Neither need be what it is taken for. One that is too deep,
    whose length does not fit, or that is the chunk itself (two saves may share it), is not used.
    """
    if not payload:
        return Encoded(Codec.RAW, payload)
    cast = _cast(payload, dtype, cast_of)
    if cast is not None:
        return cast
    element = element_of(dtype)
    if parent is not None and not _may_be_parent(parent, payload):
        parent = None
    found = [Encoded(Codec.RAW, payload)]
    if element is not None:
        planes = _planes(payload, element, parent, coder)
        found.append(planes)
        if level == "small" and parent is not None and element in FRACTION_BITS:
            one = _context(payload, element, parent)
            if len(one.stored) <= _CONTEXT_BELOW * len(planes.stored):
                found.append(one)
    if element is None or is_integer(element) or _repeats(payload):
        body = coder.searching(payload)
        if len(body) < len(payload):
            found.append(Encoded(Codec.ZSTD, encode_chunk(Header(Codec.ZSTD, len(payload)), [body])))
    return min(found, key=lambda one: len(one.stored))


def _may_be_parent(parent: Parent, payload: Buffer) -> bool:
    return (
        len(parent.payload) == len(payload)
        and parent.depth < MAX_DEPTH
        and not _equal(parent.payload, payload)
    )


def _equal(one: Buffer, other: Buffer) -> bool:
    # memoryviews are compared value by value, at 1 GB/s; bytes at 60.
    first, second = memoryview(one), memoryview(other)
    return bytes(first[:64]) == bytes(second[:64]) and bytes(first) == bytes(second)


def _repeats(payload: Buffer) -> bool:
    return KERNELS.repeats(payload) * _REPEATS_BYTES >= len(payload) > 0


def _cast(payload: Buffer, dtype: str | None, cast_of: Sequence[Parent]) -> Encoded | None:
    if dtype != "BF16" or not 1 <= len(cast_of) <= 2:
        return None
    depth = 1 + max(parent.depth for parent in cast_of)
    lengths = [len(parent.payload) for parent in cast_of]
    if sum(lengths) != 2 * len(payload) or any(length % 4 for length in lengths) or depth > MAX_DEPTH:
        return None
    at = 0
    view = memoryview(payload)
    for parent in cast_of:
        half = len(parent.payload) // 2
        if not _equal(KERNELS.cast(parent.payload), view[at : at + half]) or _equal(parent.payload, payload):
            return None
        at += half
    ids = tuple(parent.chunk for parent in cast_of)
    stored = encode_chunk(Header(Codec.CAST, len(payload), None, depth, ids), ())
    return Encoded(Codec.CAST, stored, depth, ids)


def _planes(payload: Buffer, element: Element, parent: Parent | None, coder: Coder) -> Encoded:
    if parent is not None and not _helps(payload, parent, element):
        parent = None
    body = _body(payload, element, None if parent is None else parent.payload, coder)
    if parent is None:
        header = Header(Codec.PLANES, len(payload), element)
    else:
        header = Header(Codec.DELTA, len(payload), element, parent.depth + 1, (parent.chunk,))
    return Encoded(header.codec, encode_chunk(header, body), header.depth, header.parents)


def _context(payload: Buffer, element: Element, parent: Parent) -> Encoded:
    header = Header(Codec.CONTEXT, len(payload), element, parent.depth + 1, (parent.chunk,))
    stored = encode_chunk(header, context.packed(payload, parent.payload, element))
    return Encoded(header.codec, stored, header.depth, header.parents)


def _helps(payload: Buffer, parent: Parent, element: Element) -> bool:
    """Whether the differences to the parent seem to take less room than the values: by the bits that the
    sampled planes take if each byte costs what its frequency in its plane says."""
    width, parameters = WIDTH[element], PARAMETERS[element]
    first, second = memoryview(payload)[:_SAMPLED_BYTES], memoryview(parent.payload)[:_SAMPLED_BYTES]
    samples = KERNELS.sample(first, second, width, parameters) + KERNELS.sample(
        first, None, width, parameters
    )
    counts = np.frombuffer(samples, np.uint32).reshape(2, width, 256)
    total = int(counts[0, 0].sum())
    bits = _COUNTS[total] - _COUNTS[counts].sum(axis=2)
    bits[bits > _RAW_ABOVE * 8 * total] = 8 * total
    with_parent, alone = bits.sum(axis=1).tolist()
    return bool(with_parent < alone)


def _body(payload: Buffer, element: Element, parent: Buffer | None, coder: Coder) -> list[Buffer]:
    width = WIDTH[element]
    count = len(payload) // width
    values = memoryview(KERNELS.split(payload, parent, width, PARAMETERS[element]))
    compress = coder.searching if is_integer(element) else coder.huffman
    planes: list[Buffer] = []
    for at in range(0, width * count, count or 1):
        plane = values[at : at + count]
        frame = compress(plane)
        planes.append(frame if len(frame) <= _RAW_ABOVE * count else plane)
    lengths = struct.pack(f"<{width}I", *map(len, planes)) if planes else bytes(4 * width)
    return [lengths, *planes, memoryview(payload)[width * count :]]
