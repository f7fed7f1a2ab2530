"""Reading whole chunks out of segments: decoded through the chunks they are encoded against, and hashed.

One rule: what `read` returns matches the chunk id. If it does not, the error names the place of what is
damaged, which may be that of a chunk further up.

Source: FORMAT.md, "Encoded segments", "Reading".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from ckptfs.store.codecs import Coder, Plain, Stored, decode_chunk, decode_chunks, whole
from ckptfs.store.errors import Corrupt, Unsupported
from ckptfs.store.hashing import Buffer
from ckptfs.store.ids import ChunkId, cid_text
from ckptfs.store.neighbours import Neighbours
from ckptfs.store.segment_files import SegmentFiles, check_payload, place_of
from ckptfs.store.segment_format import Codec, Location

Locate = Callable[[ChunkId], Location | None]
"""Where a chunk lies; None: nowhere."""
Kept = Callable[[ChunkId], Buffer | None]
"""The plain bytes of a chunk, if they are at hand, verified."""


def nowhere(_: ChunkId) -> None:
    """Nothing is known of any other chunk."""


class ChunkFiles:
    """Reads chunks by their places. Owned by one thread at a time, with its `files`."""

    def __init__(self, files: SegmentFiles, locate: Locate = nowhere, kept: Kept = nowhere) -> None:
        """`locate` is asked for the chunks that an encoded one leads to, `kept` before it."""
        self._files = files
        self._locate = locate
        self._kept = kept
        self._coder: Coder | None = None
        self._explaining: set[ChunkId] = set()

    def read(self, chunk: ChunkId, location: Location) -> bytes:
        """All of a chunk that is said to lie at `location`.

        Corrupt if it does not, or one of the chunks it is encoded against is not to be had; Unsupported for
        a codec of a later program.
        """
        if location.codec == Codec.RAW:
            payload = self._stored(location)
            check_payload(chunk, location, payload)
            return payload
        met: list[tuple[ChunkId, Location]] = []
        try:
            return decode_chunk(chunk, lambda one: self._fetch(one, chunk, location, met), self._own_coder())
        except Corrupt as e:
            raise self._explained(chunk, location, met, e) from None

    def read_together(
        self, places: Mapping[ChunkId, Location], parents: Mapping[ChunkId, Location]
    ) -> dict[ChunkId, Plain]:
        """All bytes of those encoded chunks that are right; of the others `read` says what is wrong.

        `parents` are the places of all that they lead to. Memory: as `decode_chunks` says, and the chunks.
        """
        neighbours = Neighbours(self._files, [*places.values(), *parents.values()])

        def fetch(one: ChunkId) -> Stored:
            place = places.get(one) or parents.get(one)
            if place is None:
                raise Corrupt(f"chunk {cid_text(one)} is not in the index", expected=one)
            return Stored(place.codec, place.length, neighbours.payload(place))

        found = decode_chunks([*places], fetch, self._own_coder())
        for chunk, location in places.items():
            if chunk not in found:
                # What is decoded piece by piece may be right yet.
                with suppress(Corrupt, Unsupported):
                    found[chunk] = whole(self.read(chunk, location))
        return found

    def _own_coder(self) -> Coder:
        if self._coder is None:
            self._coder = Coder()
        return self._coder

    def _stored(self, location: Location) -> bytes:
        return self._files.pread(location.segment, location.in_idx, location.stored, location.offset)

    def _fetch(
        self, one: ChunkId, chunk: ChunkId, location: Location, met: list[tuple[ChunkId, Location]]
    ) -> Stored:
        place: Location | None = location
        if one != chunk:
            plain = self._kept(one)
            if plain is not None:
                return Stored(Codec.RAW, len(plain), plain)
            place = self._locate(one)
            if place is None:
                raise Corrupt(f"chunk {cid_text(one)} is not in the index", expected=one)
        assert place is not None, "a place or an error"
        met.append((one, place))
        return Stored(place.codec, place.length, self._stored(place))

    def _explained(
        self, chunk: ChunkId, location: Location, met: list[tuple[ChunkId, Location]], error: Corrupt
    ) -> Corrupt:
        """What is wrong with a chunk that could not be decoded."""
        what = f"chunk {cid_text(chunk)} cannot be decoded"
        if error.expected is not None and error.expected != chunk:
            return Corrupt(f"{what}: {error}", expected=chunk, place=error.place or place_of(location))
        # What was fetched last leads to nothing else, and so on upwards.
        for one, place in reversed(met[1:]):
            if one in self._explaining:
                continue  # it leads to itself
            self._explaining.add(one)
            try:
                self.read(one, place)
            except Corrupt as e:
                why = f"{what}: it is encoded against chunk {cid_text(one)}, which is damaged"
                return Corrupt(why, expected=chunk, place=e.place)
            finally:
                self._explaining.discard(one)
        if error.got is not None:
            what = f"chunk {cid_text(chunk)} does not match its bytes"
            return Corrupt(what, expected=chunk, got=error.got, place=place_of(location))
        return Corrupt(f"{what}: {error}", expected=chunk, place=error.place or place_of(location))
