"""A chunk and the chunks that it was encoded against: decoded together, and shown to be right.

One rule: what is returned hashes to the id that was asked for. A chain ends, whatever the stored bytes say: a
parent's depth is less than its child's, and a chunk costs at most MAX_CHUNKS chunks.

Source: FORMAT.md, "Encoded chunks", "Depth".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptfs.store.codecs.decoding import Chain, Plain, decode, unpack_chain, unpack_chains, whole
from ckptfs.store.codecs.encoded_chunk import Header, decode_header
from ckptfs.store.codecs.entropy import Coder
from ckptfs.store.errors import CkptfsError, Corrupt
from ckptfs.store.hashing import Buffer, chunk_id
from ckptfs.store.ids import ChunkId, cid_text
from ckptfs.store.segment_format import MAX_DEPTH, Codec

MAX_CHUNKS: Final = 2 * (MAX_DEPTH + 1)
"""One cast, of two chunks, in a chain of the greatest depth takes as many."""
_TOGETHER_BYTES: Final = 12 << 20
"""What is held, stored and plain, before it is decoded in one go; a chain more at most."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What is stored for a chunk, and what its row says: the codec and the length once decoded."""

    codec: int
    length: int
    stored: Buffer


Fetch = Callable[[ChunkId], Stored]
"""Brings what is stored for a chunk, or its plain bytes as RAW if they are at hand; raises NotFound."""


def decode_chunk(chunk: ChunkId, fetch: Fetch, coder: Coder) -> bytes:
    """The plain bytes of `chunk`, verified against its id; Corrupt if they are not to be had.

    Raises Unsupported if a later release encoded one of the chunks, and what `fetch` raises. Memory: the
    stored and the plain bytes of the chunks on one way down the chain.
    """
    walk = _Walk(fetch, coder)
    plain = bytes(walk.plain(chunk, MAX_DEPTH + 1))
    got = chunk_id(plain)
    if got != chunk:
        parents = f" (decoded from {walk.taken} chunks)" if walk.taken > 1 else ""
        raise Corrupt(f"chunk {cid_text(chunk)} decodes to other bytes{parents}", expected=chunk, got=got)
    return plain


def decode_chunks(chunks: Sequence[ChunkId], fetch: Fetch, coder: Coder) -> dict[ChunkId, Plain]:
    """The plain bytes of those of `chunks` that are to be had, verified; of the others `decode_chunk` says
    what is wrong with them. Raises what `fetch` raises that is no CkptfsError.

    A thread that decodes many hands the GIL over at their ids only. What was decoded in one go lies in one
    buffer, in the order that was asked for.
    """
    found: dict[ChunkId, Plain] = {}
    waiting: dict[ChunkId, Chain] = {}
    held = 0
    for chunk in chunks:
        try:
            met = _Walk(fetch, coder).chain(chunk, MAX_DEPTH + 1)
        except CkptfsError:
            continue
        if not isinstance(met, Chain):
            found[chunk] = whole(bytes(met))
            continue
        waiting[chunk] = met
        held += sum(len(stored) for stored, _ in met.links) + met.links[-1][1].length
        if held >= _TOGETHER_BYTES:
            found |= _unpacked(waiting, coder)
            waiting, held = {}, 0
    found |= _unpacked(waiting, coder)
    return {chunk: plain for chunk, plain in found.items() if chunk_id(plain.view) == chunk}


def _unpacked(waiting: Mapping[ChunkId, Chain], coder: Coder) -> dict[ChunkId, Plain]:
    plains = unpack_chains([*waiting.values()], coder)
    return {chunk: plain for chunk, plain in zip(waiting, plains, strict=True) if plain is not None}


class _Walk:
    """One answer: how many chunks it has taken so far."""

    __slots__ = ("_coder", "_fetch", "taken")

    def __init__(self, fetch: Fetch, coder: Coder) -> None:
        self._fetch = fetch
        self._coder = coder
        self.taken = 0

    def plain(self, chunk: ChunkId, below: int) -> Buffer:
        """The bytes of a chunk whose depth is less than `below`."""
        met = self.chain(chunk, below)
        return unpack_chain(met, self._coder) if isinstance(met, Chain) else met

    def chain(self, chunk: ChunkId, below: int) -> Chain | Buffer:
        """The same, or the chain that they are at the end of."""
        links: list[tuple[Buffer, Header]] = []
        parent: Buffer | None = None
        while parent is None:
            stored, header = self._taken(chunk, below)
            if header is None:
                parent = stored
            elif header.codec not in (Codec.PLANES, Codec.DELTA):
                parents = [self.plain(one, header.depth) for one in header.parents]
                parent = decode(stored, header, parents, self._coder)
            else:
                links.append((stored, header))
                if not header.parents:
                    break
                (chunk,), below = header.parents, header.depth
        if links:
            return Chain(links[::-1], parent)
        assert parent is not None, "a chunk or an error"
        return parent

    def _taken(self, chunk: ChunkId, below: int) -> tuple[Buffer, Header | None]:
        """What is stored for a chunk, and its header; None: these are its plain bytes."""
        self.taken += 1
        if self.taken > MAX_CHUNKS:
            raise Corrupt(f"the chain of chunk {cid_text(chunk)} has more than {MAX_CHUNKS} chunks")
        found = self._fetch(chunk)
        if found.codec == Codec.RAW:
            if len(found.stored) != found.length:
                raise Corrupt(
                    f"raw chunk {cid_text(chunk)} has {len(found.stored)} bytes, not {found.length}"
                )
            return found.stored, None
        header = decode_header(found.stored)
        if header.codec != found.codec or header.length != found.length:
            raise Corrupt(
                f"chunk {cid_text(chunk)} is {header.length} bytes by codec {header.codec.name}; "
                f"its row says {found.length} bytes by codec {found.codec}"
            )
        if header.depth >= below:
            raise Corrupt(f"chunk {cid_text(chunk)} has depth {header.depth}, and its child's is {below}")
        return found.stored, header
