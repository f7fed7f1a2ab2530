"""From the stored bytes of a chunk to its plain bytes.

One rule: memory is taken only for what was agreed on before, the chunk's length as its row says; whatever is
not an encoding is Corrupt. That the bytes are the right ones is shown by their id alone (`chain`).

Source: FORMAT.md, "Encoded chunks".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ckptfs.store.codecs import context
from ckptfs.store.codecs.elements import PARAMETERS, WIDTH, Element
from ckptfs.store.codecs.encoded_chunk import Header, body_of
from ckptfs.store.codecs.entropy import Coder
from ckptfs.store.codecs.kernels import KERNELS
from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import Buffer
from ckptfs.store.segment_format import Codec

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


def unpack_chain(chain: Sequence[tuple[Buffer, Header]], parent: Buffer | None, coder: Coder) -> Buffer:
    """The plain bytes of the last of a chain of chunks that consist of planes (at least one), or Corrupt.

    Each is encoded against the one before it, the first against `parent` if there is one. This returns what
    `decode` makes of them one by one, sooner.
    """
    found = _unpacked(chain, parent, coder)
    for encoded, header in chain if found is None else ():
        parent = decode(encoded, header, [] if parent is None else [parent], coder)
    plain = parent if found is None else found
    assert plain is not None, "a chain has a chunk"
    return plain


def _unpacked(chain: Sequence[tuple[Buffer, Header]], parent: Buffer | None, coder: Coder) -> bytes | None:
    length = chain[0][1].length
    if coder.unpacker is None or (parent is not None and len(parent) != length):
        return None
    chunks: list[tuple[Buffer, int, int]] = []
    for encoded, header in chain:
        assert header.element is not None, "a header of planes has an element"
        if header.length != length:
            return None
        chunks.append((body_of(encoded, header), WIDTH[header.element], PARAMETERS[header.element]))
    return coder.unpacker.unpack(chunks, parent, length)


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
