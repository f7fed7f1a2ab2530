"""From the stored bytes of a chunk to its plain bytes.

One rule: memory is taken only for what was agreed on before, the chunk's length as its row says; whatever is
not an encoding is Corrupt. That the bytes are the right ones is shown by their id alone (`chain`).

Source: FORMAT.md, "Encoded chunks".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ckptfs.store.codecs import context
from ckptfs.store.codecs.elements import PARAMETERS, WIDTH, Element
from ckptfs.store.codecs.encoded_chunk import Header, body_of
from ckptfs.store.codecs.entropy import Coder
from ckptfs.store.codecs.kernels import KERNELS, Packed, PackedChain, new_block
from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import Buffer
from ckptfs.store.segment_format import Codec


@dataclass(frozen=True, slots=True)
class Chain:
    """Chunks that consist of planes (at least one), each encoded against the one before it; the first one
    against `parent`, if there is one."""

    links: Sequence[tuple[Buffer, Header]]
    parent: Buffer | None


@dataclass(frozen=True, slots=True)
class Plain:
    """The plain bytes of a chunk: `length` of them from `start` of a buffer that others may share."""

    buffer: memoryview
    start: int
    length: int

    @property
    def view(self) -> memoryview:
        """The bytes."""
        return self.buffer[self.start : self.start + self.length]


def whole(plain: bytes) -> Plain:
    """Plain bytes that nobody shares."""
    return Plain(memoryview(plain), 0, len(plain))


_LENGTHS = {width: struct.Struct(f"<{width}I") for width in (1, 2, 4, 8)}


def decode(encoded: Buffer, header: Header, parents: Sequence[Buffer], coder: Coder) -> bytes:
    """The `header.length` plain bytes of a chunk, or Corrupt.

    `header` is `decode_header` of the same bytes, whose length the caller has compared with that of the
    chunk's row; `parents` are the plain bytes of the header's parents, in order.
    """
    assert len(parents) == len(header.parents), "as many parents as the header names"
    body = body_of(encoded, header)
    match header.codec:
        case Codec.ZSTD:
            return coder.plain(body, header.length)
        case Codec.PLANES:
            return _joined(body, header, None, coder)
        case Codec.DELTA:
            if len(parents[0]) != header.length:
                raise Corrupt(f"a chunk of {header.length} bytes has a parent of {len(parents[0])}")
            return _joined(body, header, parents[0], coder)
        case Codec.CONTEXT:
            assert header.element is not None, "a header of contexts has an element"
            if len(parents[0]) != header.length:
                raise Corrupt(f"a chunk of {header.length} bytes has a parent of {len(parents[0])}")
            return context.unpacked(body, parents[0], header.element)
        case Codec.CAST:
            return _cast(body, header, parents)
        case _:
            raise AssertionError("a header is of a known codec, and not raw")


def unpack_chain(chain: Chain, coder: Coder) -> Buffer:
    """The plain bytes of the last chunk of a chain, or Corrupt: what `decode` makes of its chunks one by one,
    sooner."""
    packed = None if coder.unpacker is None else _packed(chain)
    if packed is not None and coder.unpacker is not None:
        found = coder.unpacker.unpack(*packed)
        if found is not None:
            return found
    plain = chain.parent
    for encoded, header in chain.links:
        plain = decode(encoded, header, [] if plain is None else [plain], coder)
    assert plain is not None, "a chain has a chunk"
    return plain


def unpack_chains(chains: Sequence[Chain], coder: Coder) -> list[Plain | None]:
    """The same of many chains, with one native call where there is native code. None: `unpack_chain` has
    them, or says what is wrong."""
    if coder.unpacker is None:
        return [_alone(chain, coder) for chain in chains]
    found: list[Plain | None] = [None] * len(chains)
    packed = [(at, one) for at, one in enumerate(map(_packed, chains)) if one is not None]
    if not packed:
        return found
    block, start = new_block(sum(length for _, (_, _, length) in packed)), 0
    are_there = coder.unpacker.unpack_all([one for _, one in packed], block)
    shown = block.toreadonly()
    for (at, (_, _, length)), is_there in zip(packed, are_there, strict=True):
        if is_there:
            found[at] = Plain(shown, start, length)
        start += length
    return found


def _alone(chain: Chain, coder: Coder) -> Plain | None:
    try:
        return whole(bytes(unpack_chain(chain, coder)))
    except Corrupt:
        return None


def _packed(chain: Chain) -> PackedChain | None:
    """What the native code takes; None if the chunks do not fit together."""
    length = chain.links[0][1].length
    if chain.parent is not None and len(chain.parent) != length:
        return None
    chunks: list[Packed] = []
    for encoded, header in chain.links:
        assert header.element is not None, "a header of planes has an element"
        if header.length != length:
            return None
        chunks.append((body_of(encoded, header), WIDTH[header.element], PARAMETERS[header.element]))
    return chunks, chain.parent, length


def _joined(body: memoryview, header: Header, parent: Buffer | None, coder: Coder) -> bytes:
    element = header.element
    assert element is not None, "a header of planes has an element"
    planes, tail = _planes(body, header.length, element, coder)
    return KERNELS.join(planes, parent, WIDTH[element], PARAMETERS[element], tail)


def _planes(body: memoryview, length: int, element: Element, coder: Coder) -> tuple[list[Buffer], memoryview]:
    width = WIDTH[element]
    table = _LENGTHS[width]
    count, rest = divmod(length, width)
    if len(body) < table.size:
        raise Corrupt("an encoded chunk ends in the lengths of its planes")
    stored = table.unpack_from(body)
    # Before the first plane is decompressed, so that no frame is looked for where the lengths lie.
    if max(stored) > count or table.size + sum(stored) + rest != len(body):
        raise Corrupt(f"an encoded chunk of {length} bytes has planes of {', '.join(map(str, stored))} bytes")
    planes: list[Buffer] = []
    at = table.size
    for size in stored:
        plane = body[at : at + size]
        planes.append(plane if size == count else coder.plain(plane, count))
        at += size
    return planes, body[at:]


def _cast(body: memoryview, header: Header, parents: Sequence[Buffer]) -> bytes:
    if body:
        raise Corrupt(f"a cast has a body of {len(body)} bytes")
    if sum(map(len, parents)) != 2 * header.length or any(len(parent) % 4 for parent in parents):
        raise Corrupt(f"a cast of {header.length} bytes has parents of {[*map(len, parents)]} bytes")
    return b"".join(map(KERNELS.cast, parents))
