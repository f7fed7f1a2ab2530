"""Packs of what this store has, made in memory that is used again and again.

One rule: memory is used again only when nobody has a view of it: not the library that sent it, nor a thread
that a cancelled caller left behind.

Fresh memory is dear: with an object for each chunk and each pack a push took 0.5 million page faults a GiB,
and 3.5 of its 6 CPU seconds (measured on a virtual machine, which gets each page from its host).
"""

from __future__ import annotations

import trio

from ckptfs.store.chunk_files import ChunkFiles
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt
from ckptfs.store.places import Places
from ckptfs.store.remote.pack import encode_pack, encode_pack_header
from ckptfs.store.remote.reading import read_chunks
from ckptfs.store.segment_files import SegmentFiles
from ckptfs.store.segment_format import Codec
from ckptfs.store.segments import Segments

_MOST_BYTES = 64 << 20
_ROUND_BYTES = 1 << 20


class Buffers:
    """Memory for packs; what nobody uses is kept for the next. Belongs to one thread."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self, size_bytes: int) -> memoryview:
        """Memory of this size, with anything in it."""
        buffer = self._free.pop() if self._free else bytearray()
        if len(buffer) < size_bytes:
            buffer = bytearray(-(-size_bytes // _ROUND_BYTES) * _ROUND_BYTES)
        return memoryview(buffer)[:size_bytes]

    def give_back(self, view: memoryview) -> None:
        """What `take` gave is not needed any more by the caller, who looks at it no more."""
        buffer = view.obj
        view.release()
        assert isinstance(buffer, bytearray), "a view that take gave"
        try:
            # Python refuses to change the length of what somebody has a view of.
            buffer.append(buffer.pop())
        except BufferError:
            return  # it goes with the last of them
        if len(buffer) <= _MOST_BYTES:
            self._free.append(buffer)


async def fill_pack(
    buffers: Buffers, disk: Disk, segments: Segments, places: Places, generation: int
) -> memoryview:
    """A pack of these chunks, which were hashed, in memory of `buffers`, to be given back to them. Corrupt
    names the first that is wrong."""
    sizes: list[int] = places.rows["length"].tolist()
    header = encode_pack_header(list(zip(places.chunks, sizes, strict=True)), generation)
    if len(header) + sum(sizes) <= _MOST_BYTES:
        pack = buffers.take(len(header) + sum(sizes))
        pack[: len(header)] = header
        if await trio.to_thread.run_sync(_fill, disk, places, pack[len(header) :]):
            return pack
        buffers.give_back(pack)
    # Too large to be kept, or a chunk is not right where it was.
    chunks = await read_chunks(disk, segments, places)
    content = await trio.to_thread.run_sync(encode_pack, chunks, generation)
    return memoryview(bytearray(content))


def _fill(disk: Disk, places: Places, payloads: memoryview) -> bool:
    """Read chunks, one behind the other; False unless all are right."""
    files = SegmentFiles(disk)
    chunks = ChunkFiles(files, places.parents.get)
    at = 0
    try:
        for number, chunk in enumerate(places.chunks):
            location = places.location(number)
            payload = payloads[at : at + location.length]
            at += location.length
            if location.codec == Codec.RAW and location.stored == location.length:
                files.fill_verified(payload, chunk, location)
                continue
            decoded = chunks.read(chunk, location)
            if len(decoded) != len(payload):
                return False
            payload[:] = decoded
    except Corrupt:
        return False
    finally:
        files.close()
        payloads.release()
    return True
