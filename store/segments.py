"""Reading from the store: chunks, files, recipes and trees, verified at their first read.

One rule: bytes leave this module only if their chunk was hashed and found right since the mount
(what was ingested since then counts). Otherwise Corrupt is raised; there is no zero and no guess.
An encoded chunk is hashed whenever it is decoded; the last ones are kept decoded.

Everything here runs inline in the index thread, for every read request of the mount: a lookup, and
one pread per run of verified neighbours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from ckptfs.store.chunk_files import ChunkFiles
from ckptfs.store.chunk_places import ChunkPlaces
from ckptfs.store.codecs import Plain, whole
from ckptfs.store.decoded_chunks import DecodedChunks
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, Place, Unsupported
from ckptfs.store.hashing import Buffer
from ckptfs.store.ids import ChunkId, RecipeId, TreeId, cid_text
from ckptfs.store.index import Index, Table
from ckptfs.store.lru import Lru
from ckptfs.store.parent_table import ParentTable
from ckptfs.store.places import Places, Suspect, decode_places
from ckptfs.store.read_plan import Decoded, Part, ReadPlan, Run, Unverified, plan_read
from ckptfs.store.recipe import Recipe, decode_recipe
from ckptfs.store.segment_counts import Stored, StoredSums
from ckptfs.store.segment_files import Bad, SegmentFiles, bad_of
from ckptfs.store.segment_format import (
    PARENTS_OF,
    Codec,
    Location,
    SegmentFacts,
    decode_facts,
    segment_key,
    segment_number,
)
from ckptfs.store.tree import Entry, decode_tree
from ckptfs.store.verified import Pins, Verified

_RECIPE_PIECES = 1 << 19
_TREE_ENTRIES = 1 << 15
_CORRUPTIONS = 1000
_REQUEST_BYTES = 1 << 20
_DECODED_BYTES = 64 << 20
_ALONE = frozenset(codec for codec, (_, most) in PARENTS_OF.items() if not most)
"""The codecs of chunks that are encoded against nothing."""


class Marked(set[int]):
    """Segments with a mark, by number. `on_change(number, whether it has the mark)` may keep account."""

    def __init__(self) -> None:
        super().__init__()
        self.on_change: Callable[[int, bool], None] = lambda number, marked: None

    def add(self, number: int) -> None:
        """Mark it."""
        if number not in self:
            super().add(number)
            self.on_change(number, True)

    def discard(self, number: object) -> None:
        """Take the mark away."""
        if isinstance(number, int) and number in self:
            super().discard(number)
            self.on_change(number, False)


class Segments:
    """The stored chunks. Every method belongs to the index thread.

    `corruptions` holds the last mismatches as (chunk, place), of `corruption_count` in all; `pins` the
    chunks that no record names yet; `suspect` the segments in which a chunk was bad, so that every hit in
    them is checked; `damaged` those of them of which the quarantine has made no copy yet;
    `is_lent` says whether somebody reads a segment without asking us, even if it is gone meanwhile.
    """

    def __init__(self, disk: Disk, index: Index) -> None:
        self._index = index
        self._places = ChunkPlaces(index)
        self._files = SegmentFiles(disk)
        self._decoded = DecodedChunks(_DECODED_BYTES)
        self._chunks = ChunkFiles(self._files, self.locate, self._decoded.view)
        self.parents = ParentTable(index)
        self._recipes: Lru[RecipeId, Recipe] = Lru(_RECIPE_PIECES)
        self._trees: Lru[TreeId, tuple[Entry, ...]] = Lru(_TREE_ENTRIES)
        self._buffer = memoryview(bytearray(_REQUEST_BYTES))
        self.verified = Verified()
        self.pins = Pins()
        self.suspect = Marked()
        self.damaged = Marked()
        self.is_lent: Callable[[int], bool] = lambda number: False
        self.corruptions: deque[tuple[ChunkId, Place]] = deque(maxlen=_CORRUPTIONS)
        self.corruption_count = 0
        self._sums = StoredSums(index)
        index.watch_always(self._sums.note)

    def locate(self, chunk: ChunkId) -> Location | None:
        """Where a chunk lies, or None if it is not stored."""
        return self._places.get(chunk)

    def locate_many(self, chunks: Iterable[ChunkId]) -> Places:
        """Where chunks lie, in the order of their ids; those that are not stored are left out."""
        ordered = sorted(chunks)
        rows = self._index.get_many(Table.CHUNK, ordered)
        stored = [row for row in rows if row is not None]
        if len(stored) < len(rows):
            ordered = [chunk for chunk, row in zip(ordered, rows, strict=True) if row is not None]
        places = decode_places(ordered, stored)
        encoded = places.encoded_ones()
        return places.with_parents(self.parents_of(encoded)) if encoded else places

    def parents_of(self, suspects: Iterable[Suspect]) -> dict[ChunkId, Location]:
        """The places of all chunks that encoded ones among these lead to, for a reader in another thread.

        What cannot be found is left out; whoever reads that chunk is told.
        """
        return self.ways_to(self._direct_parents(*suspect) for suspect in suspects)

    def ways_to(self, parents: Iterable[Sequence[ChunkId]]) -> dict[ChunkId, Location]:
        """The places of these chunks, and of all that they lead to."""
        found: dict[ChunkId, Location] = {}
        waiting = [parent for some in parents for parent in some]
        while waiting:
            chunk = waiting.pop()
            try:
                location = None if chunk in found else self.locate(chunk)
            except Corrupt:
                continue
            if location is not None:
                found[chunk] = location
                waiting += self._direct_parents(chunk, location)
        return found

    def _direct_parents(self, chunk: ChunkId, location: Location) -> tuple[ChunkId, ...]:
        try:
            lineage = self.parents.lineage(chunk) if location.codec not in _ALONE else None
        except Corrupt:
            lineage = None
        return () if lineage is None else lineage.parents

    def facts(self, segment: int) -> SegmentFacts | None:
        """What is known of a segment, or None if there is none of that number."""
        encoded = self._index.get(Table.SEGMENT, segment_key(segment))
        return None if encoded is None else decode_facts(encoded)

    def payload_bytes(self) -> int:
        """Bytes of unique payload that are stored."""
        return self._sums.now.raw_bytes + self._sums.now.encoded_bytes

    def stored(self) -> Stored:
        """The same by how it is stored."""
        return self._sums.now

    def read(self, chunk: ChunkId, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a chunk, all of it by default. Corrupt if it is not what was stored."""
        location = self._located(chunk)
        stop = location.length if length is None else min(start + length, location.length)
        if start >= stop:
            return b""
        if location.codec != Codec.RAW:
            return bytes(self._plain(chunk, location)[start:stop])
        if location in self.verified:
            at = location.offset + start
            return self._files.pread(location.segment, location.in_idx, stop - start, at)
        return self._verify(chunk, location)[start:stop]

    def read_once(self, chunk: ChunkId) -> bytes:
        """All of a chunk, hashed now whatever was known of it: what was right an hour ago may have rotted.
        Not noted as verified: a walk over the whole store does not grow the daemon by what it has seen."""
        return self._read_verified(chunk, self._located(chunk))

    def keep_decoded(self, plains: Mapping[ChunkId, Plain]) -> None:
        """Somebody decoded chunks, and their bytes are right."""
        self._decoded.put(plains)

    def read_recipe(self, identity: RecipeId) -> Recipe:
        """A file's recipe; Corrupt if its chunk is damaged or not a recipe."""
        recipe = self._recipes.get(identity)
        if recipe is None:
            recipe = decode_recipe(self.read(identity))
            self._recipes.put(identity, recipe, len(recipe) + 1)
        return recipe

    def read_tree(self, identity: TreeId) -> tuple[Entry, ...]:
        """A saved directory; Corrupt if its chunk is damaged or not a tree."""
        found = self.tree_or_bytes(identity)
        if isinstance(found, bytes):
            found = decode_tree(found)
            self.keep_tree(identity, found)
        return found

    def tree_or_bytes(self, identity: TreeId) -> tuple[Entry, ...] | bytes:
        """A saved directory if it is known, else what it is decoded from; Corrupt if that is damaged."""
        entries = self._trees.get(identity)
        return self.read(identity) if entries is None else entries

    def keep_tree(self, identity: TreeId, entries: tuple[Entry, ...]) -> None:
        """Somebody decoded a saved directory, and this is in it."""
        self._trees.put(identity, entries, len(entries) + 1)

    def read_file(self, recipe: Recipe, offset: int, length: int) -> bytes:
        """Bytes of a file; fewer than `length` only at its end. Holes are zeros.

        Verified neighbours that lie one behind the other in a segment become one pread.
        """
        parts = [self._part(part) for part in self.plan_read(recipe, offset, length).parts]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def plan_read(self, recipe: Recipe, offset: int, length: int) -> ReadPlan:
        """What reading these bytes takes; Corrupt if a chunk has no place."""
        return plan_read(recipe, offset, length, self._located, self.verified, self._decoded.get)

    def show(self, plan: ReadPlan) -> memoryview:
        """The bytes of a plan of this very step, for a system call that takes them before the next
        call of anything here: a view of a mapped segment, or of a buffer that is used again.

        A segment that cannot be read shows in that call, as EFAULT.
        """
        if len(plan.parts) == 1:
            part = plan.parts[0]
            if isinstance(part, Decoded):
                return part.view
            if isinstance(part, Run) and not part.is_hole:
                return self._files.show(part.segment, part.in_idx, part.length, part.offset)
        if plan.length > len(self._buffer):
            self._buffer = memoryview(bytearray(plan.length))
        view, at = self._buffer[: plan.length], 0
        for part in plan.parts:
            self._fill(view[at : at + part.length], part)
            at += part.length
        return view

    def file_reader(self, recipe: Recipe) -> FileReader:
        """The file as the parsers of `formats` read it; index thread only."""
        return FileReader(self, recipe)

    def check(self, chunk: ChunkId) -> None:
        """Read and hash a chunk now, whatever was known; Corrupt if it is wrong or missing."""
        self._verify(chunk, self._located(chunk))

    def mark_verified(self, segment: int) -> None:
        """All of a segment is known to be right (it was just written, or scrubbed)."""
        self.verified.add_segment(segment)

    def note_good(self, location: Location) -> None:
        """One chunk was hashed and is right."""
        marked = self.verified.add(location)
        facts = self.facts(location.segment) if marked & 0xFF == 0 else None
        if facts is not None and marked >= facts.chunks:
            self.verified.add_segment(location.segment)

    def note_all_good(self, places: Places, since: int) -> None:
        """Chunks were hashed and are right, in the places that they had when `verified.epoch` was `since`."""
        if self.verified.epoch != since:
            places = places.same_as(self.locate_many(places.chunks))
        for segment in places.segments():
            if self.verified.has_segment(segment):
                continue
            marked, facts = self.verified.add_all(segment, places.marks(segment)), self.facts(segment)
            if facts is not None and marked >= facts.chunks:
                self.verified.add_segment(segment)

    def still_bad(self, bad: Bad) -> Bad | None:
        """What another thread found wrong, if it still is so: not if the chunk has moved since, or can be
        decoded from where the chunks lie now that it is encoded against."""
        if self.locate(bad.chunk) != bad.location:
            return None
        if bad.location.codec == Codec.RAW:
            return bad
        try:
            self._chunks.read(bad.chunk, bad.location)
        except Corrupt as e:
            return bad_of(bad.chunk, bad.location, e)
        except Unsupported:
            return bad
        return None

    def note_bad(self, bad: Bad) -> None:
        """One chunk was found wrong: nothing of its segment is trusted any longer, nor of those that hold
        what is encoded against it."""
        self.corruptions.append((bad.chunk, bad.place))
        self.corruption_count += 1
        segment = segment_number(bad.place.file.rpartition("/")[2])
        if segment is None:
            segment = bad.location.segment
        self.suspect.add(segment)
        self.damaged.add(segment)
        self.verified.remove_segment(segment)
        for chunk in (bad.chunk, *self.parents.descendants(bad.chunk)):
            with suppress(Corrupt):  # a row of the index that says nothing; a scrub puts it right
                location = bad.location if chunk == bad.chunk else self.locate(chunk)
                if location is not None:
                    self.suspect.add(location.segment)
                    self.verified.remove_segment(location.segment)

    def evict(self, segment: int) -> None:
        """Close the descriptors of a segment."""
        self._files.evict(segment)

    def forget(self, segment: int) -> None:
        """Drop all that is remembered of a segment: it lost chunks or is gone."""
        self._files.evict(segment)
        self.verified.remove_segment(segment)

    def drop_marks(self, segment: int) -> None:
        """A segment goes, and with it that it is not trusted; unless somebody still reads it: then again when
        it is given back."""
        if not self.is_lent(segment):
            self.suspect.discard(segment)
            self.damaged.discard(segment)

    def given_back(self, segment: int) -> None:
        """Nobody may read a segment any more who had been lent it."""
        if segment in self.suspect and self.facts(segment) is None:
            self.drop_marks(segment)

    def close(self) -> None:
        """Close all descriptors."""
        self._files.close()

    def _located(self, chunk: ChunkId) -> Location:
        location = self._places.get(chunk)
        if location is None:
            raise Corrupt(f"chunk {cid_text(chunk)} is not in the index", expected=chunk)
        return location

    def _part(self, part: Part) -> bytes:
        if isinstance(part, Decoded):
            return bytes(part.view)
        if isinstance(part, Unverified):
            stop = part.skip + part.length
            read = self._plain if part.is_encoded else self._verify
            return bytes(read(part.chunk, part.location)[part.skip : stop])
        if part.is_hole:
            return bytes(part.length)
        return self._files.pread(part.segment, part.in_idx, part.length, part.offset)

    def _fill(self, view: memoryview, part: Part) -> None:
        if isinstance(part, Run) and not part.is_hole:
            self._files.fill(view, part.segment, part.in_idx, part.offset)
        elif isinstance(part, Unverified) and part.is_whole:
            with self._blaming(part.chunk, part.location):
                self._files.fill_verified(view, part.chunk, part.location)
            self.note_good(part.location)
        elif isinstance(part, Decoded):
            view[:] = part.view
        else:
            view[:] = self._part(part)

    def _verify(self, chunk: ChunkId, location: Location) -> bytes:
        payload = self._read_verified(chunk, location)
        self.note_good(location)
        return payload

    def _plain(self, chunk: ChunkId, location: Location) -> Buffer:
        """All bytes of an encoded chunk."""
        plain: Buffer | None = self._decoded.view(chunk)
        if plain is None:
            plain = self._verify(chunk, location)
            self.keep_decoded({chunk: whole(plain)})
        return plain

    def _read_verified(self, chunk: ChunkId, location: Location) -> bytes:
        with self._blaming(chunk, location):
            return self._chunks.read(chunk, location)

    @contextmanager
    def _blaming(self, chunk: ChunkId, location: Location) -> Iterator[None]:
        """What is Corrupt in the block is noted as bad."""
        try:
            yield
        except Corrupt as e:
            self.note_bad(bad_of(chunk, location, e))
            raise


class FileReader:
    """A stored file behind the Reader protocol of `formats`."""

    def __init__(self, segments: Segments, recipe: Recipe) -> None:
        self._segments = segments
        self._recipe = recipe

    @property
    def size(self) -> int:
        """The file's length in bytes."""
        return self._recipe.size

    def pread(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; fewer only where the file ends."""
        if offset < 0 or length <= 0:
            return b""
        return self._segments.read_file(self._recipe, offset, length)
