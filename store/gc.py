"""Which stored chunks nothing reaches, and how much room each version alone holds.

One rule: a doubt keeps the chunk. Marks are the first 8 bytes of a digest, so two chunks that share
them (1 pair in 10^19) are kept or let go together, and only if nothing reaches either.

Marking is by *stage*: 0 is what stays whatever happens; stage n, n-1, … 1 are the versions that may
go, in the order in which they go. A chunk has the lowest stage that reaches it, so it becomes free
exactly when the version of its stage, and with it all of higher stages, has gone. One pass thus
tells how many versions have to go for a wanted number of bytes.

Memory: 12 bytes a reachable chunk, and about 150 bytes a distinct recipe or tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckptfs.store.errors import Corrupt
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import DIGEST_BYTES, ChunkId, RecipeId, TreeId
from ckptfs.store.inode import Content, decode_inode
from ckptfs.store.pins import decode_pin
from ckptfs.store.tree import iter_tree

KEPT = 0
UNREACHED = (1 << 32) - 1

Digests: TypeAlias = npt.NDArray[np.uint64]
Stages: TypeAlias = npt.NDArray[np.uint32]

_FEW_MARKS = 256
_SETTLE_AT = 1 << 20
_SETTLE_SHARE = 8
_RECIPE_HEADER_BYTES = 24
_RECIPE_ROW_BYTES = 40


class Kind(Enum):
    """What a reference leads to."""

    TREE = "tree"
    RECIPE = "recipe"


@dataclass(frozen=True, slots=True)
class Reference:
    """A recipe or tree that something names. Both are chunks, and lead to more."""

    kind: Kind
    chunk: ChunkId


def references_of_inode(encoded: bytes) -> Iterator[Reference]:
    """What a live inode names."""
    return _of_content(decode_inode(encoded).content)


def references_of_pin(encoded: bytes) -> Iterator[Reference]:
    """What a pre-image names."""
    return _of_content(decode_pin(encoded).inode.content)


def references_of_version(record: VersionRecord) -> Iterator[Reference]:
    """What a version names."""
    tree = record.top.tree
    if tree is not None:
        yield Reference(Kind.TREE, tree)


def references_of_published(encoded: bytes) -> Iterator[Reference]:
    """What a directory was last published as."""
    if len(encoded) < DIGEST_BYTES:
        raise Corrupt("a published directory names no tree")
    yield Reference(Kind.TREE, ChunkId(encoded[:DIGEST_BYTES]))


def references_of_tree(encoded: bytes) -> Iterator[Reference]:
    """What a tree names; Corrupt if it is none."""
    for entry in iter_tree(encoded):
        if entry.tree is not None:
            yield Reference(Kind.TREE, entry.tree)
        if entry.recipe is not None:
            yield Reference(Kind.RECIPE, entry.recipe)


def _of_content(content: Content) -> Iterator[Reference]:
    for recipe in (content.base, content.fallback):
        if recipe is not None:
            yield Reference(Kind.RECIPE, recipe)


def marks_of_recipe(encoded: bytes) -> Digests:
    """The marks of all pieces of an encoded recipe, holes (as 0) included; Corrupt if it is none.

    The caller has verified `encoded` against its id, so only its shape is looked at.
    """
    rows, rest = divmod(len(encoded) - _RECIPE_HEADER_BYTES, _RECIPE_ROW_BYTES)
    if encoded[:4] != b"CKRC" or rest or rows < 0 or int.from_bytes(encoded[16:24], "little") != rows:
        raise Corrupt("not a recipe")
    table = np.frombuffer(encoded, dtype=np.uint8, offset=_RECIPE_HEADER_BYTES)
    starts = table.reshape(rows, _RECIPE_ROW_BYTES)[:, 8:16]
    return np.ascontiguousarray(starts).view("<u8").reshape(rows)


def marks_of_chunks(chunks: Sequence[bytes]) -> Digests:
    """The marks of chunk ids."""
    digests = np.frombuffer(b"".join(chunks), dtype=np.uint8).reshape(len(chunks), DIGEST_BYTES)
    return np.ascontiguousarray(digests[:, :8]).view("<u8").reshape(len(chunks)).astype(np.uint64, copy=False)


class _Run:
    """Marks in ascending order, each once, and their stages."""

    __slots__ = ("marks", "stages")

    def __init__(self, marks: Digests, stages: Stages) -> None:
        order = np.lexsort((stages, marks))
        marks, stages = marks[order], stages[order]
        first = np.ones(len(marks), bool)
        first[1:] = marks[1:] != marks[:-1]
        self.marks, self.stages = marks[first], stages[first]

    def find(self, marks: Digests) -> Stages:
        found = np.full(len(marks), UNREACHED, np.uint32)
        if len(self.marks) and len(marks):
            at = np.minimum(np.searchsorted(self.marks, marks), len(self.marks) - 1)
            hit = self.marks[at] == marks
            found[hit] = self.stages[at[hit]]
        return found

    def merge(self, other: _Run) -> None:
        """Take another run in. One array is copied at a time: what is not settled is small, and sorting
        all of it again would take five times the memory of what is there."""
        at = np.searchsorted(self.marks, other.marks)
        is_known = at < len(self.marks)
        is_known[is_known] = self.marks[at[is_known]] == other.marks[is_known]
        known = at[is_known]
        self.stages[known] = np.minimum(self.stages[known], other.stages[is_known])
        at, is_new = at[~is_known], ~is_known
        self.marks = np.insert(self.marks, at, other.marks[is_new])
        self.stages = np.insert(self.stages, at, other.stages[is_new])


def _no_marks() -> _Run:
    return _Run(np.empty(0, np.uint64), np.empty(0, np.uint32))


class Marks:
    """For each marked chunk the lowest stage that reaches it. One task at a time.

    Kept as a large sorted run and a small one of what came since `settle`, so that a question in
    the middle of an execution costs what is new and not what is there.
    """

    def __init__(self) -> None:
        self._settled, self._recent = _no_marks(), _no_marks()
        self._new: list[tuple[Digests, int]] = []
        self._new_count = 0
        self._one_marks = array("Q")
        self._one_stages = array("I")

    def add(self, marks: Digests, stage: int) -> None:
        """Mark chunks as reached at `stage`."""
        if len(marks) < _FEW_MARKS:
            # An array object weighs as much as dozens of marks, and most files have few chunks.
            self._one_marks.frombytes(marks.tobytes())
            self._one_stages.extend([stage] * len(marks))
            return
        self._new.append((marks, stage))
        self._new_count += len(marks)

    def add_each(self, marks: Digests, stages: Stages) -> None:
        """Mark each chunk as reached at its stage."""
        self._one_marks.frombytes(marks.tobytes())
        self._one_stages.frombytes(stages.tobytes())

    def add_one(self, chunk: ChunkId, stage: int) -> None:
        """Mark one chunk as reached at `stage`."""
        self._one_marks.append(int.from_bytes(chunk[:8], "little"))
        self._one_stages.append(stage)

    @property
    def is_settling_due(self) -> bool:
        """Whether so much was added that `settle` should be called."""
        return self._new_count + len(self._one_marks) > max(_SETTLE_AT, len(self) // _SETTLE_SHARE)

    def settle(self) -> None:
        """Sort everything into one run: a tenth of a second at ten million marks, so in a worker thread."""
        self._fold()
        self._settled.merge(self._recent)
        self._recent = _no_marks()

    def stages_of(self, marks: Digests) -> Stages:
        """The stage of each chunk, UNREACHED for one that is not marked."""
        self._fold()
        return np.minimum(self._settled.find(marks), self._recent.find(marks))

    def __len__(self) -> int:
        return len(self._settled.marks) + len(self._recent.marks)

    def _fold(self) -> None:
        if not self._new and not self._one_marks:
            return
        added, self._new, self._new_count = self._new, [], 0
        ones, self._one_marks = np.array(self._one_marks, np.uint64), array("Q")
        their_stages, self._one_stages = np.array(self._one_stages, np.uint32), array("I")
        full = [np.full(len(marks), stage, np.uint32) for marks, stage in added]
        self._recent = _Run(
            np.concatenate([self._recent.marks, ones, *(marks for marks, _ in added)]),
            np.concatenate([self._recent.stages, their_stages, *full]),
        )


class Marker:
    """The walk from the roots: gives out what has to be read, takes what was read. One task.

    An object is walked again if a lower stage comes to reach it, so the order of the roots does
    not matter, and roots may be added while the walk goes on.
    """

    def __init__(self) -> None:
        self.marks = Marks()
        self._seen: dict[ChunkId, int] = {}
        self._pending: list[tuple[Reference, int]] = []

    def reach(self, references: Iterable[Reference], stage: int = KEPT) -> None:
        """Note that these are reached at `stage`."""
        for reference in references:
            if stage < self._seen.get(reference.chunk, UNREACHED):
                self._seen[reference.chunk] = stage
                self._pending.append((reference, stage))

    def next(self) -> tuple[Reference, int] | None:
        """The next (reference, stage) whose bytes are wanted; None if the walk is complete."""
        while self._pending:
            reference, stage = self._pending.pop()
            if self._seen[reference.chunk] == stage:
                self.marks.add_one(reference.chunk, stage)
                return reference, stage
        return None

    def take_recipe(self, encoded: bytes, stage: int) -> None:
        """The bytes of a recipe that `next` gave out."""
        self.marks.add(marks_of_recipe(encoded), stage)


class Edges:
    """Which chunk is encoded against which, by their marks. One task at a time."""

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[Digests, Digests]]] = {}

    def add(self, depth: int, children: Sequence[bytes], parents: Sequence[bytes]) -> None:
        """Note pairs of child and parent, the children all of one depth."""
        self._rows.setdefault(depth, []).append((marks_of_chunks(children), marks_of_chunks(parents)))

    def follow(self, marks: Marks) -> None:
        """Mark the parents of what is marked: each at the lowest stage that reaches a child of it.

        A parent's depth is less than its child's, so that one pass from the deepest on reaches all.
        """
        for depth in sorted(self._rows, reverse=True):
            for children, parents in self._rows[depth]:
                stages = marks.stages_of(children)
                reached = stages != UNREACHED
                marks.add_each(parents[reached], stages[reached])


@dataclass(slots=True)
class Census:
    """Stored bytes by stage: what is free already, and what each version that goes would free."""

    garbage_bytes: int = 0
    stage_bytes: dict[int, int] = field(default_factory=dict)

    def add(self, stage: int, stored: int) -> None:
        """Count one chunk that is not kept."""
        if stage == UNREACHED:
            self.garbage_bytes += stored
        else:
            self.stage_bytes[stage] = self.stage_bytes.get(stage, 0) + stored

    def versions_to_forget(self, wanted_bytes: int, count: int) -> int:
        """How many of `count` versions must go, in their order, to free `wanted_bytes`.

        All of them if even that is not enough.
        """
        freed, going = self.garbage_bytes, 0
        while freed < wanted_bytes and going < count:
            freed += self.stage_bytes.get(count - going, 0)
            going += 1
        return going


@dataclass(frozen=True, slots=True)
class GcPlan:
    """The chunks to let go, by (generation, number of their segment), and the bytes they occupy. What is
    encoded against others is of an earlier generation than they are, and goes first."""

    dead: dict[tuple[int, int], tuple[ChunkId, ...]]
    stored_bytes: int

    @property
    def chunks(self) -> int:
        """How many chunks go."""
        return sum(len(chunks) for chunks in self.dead.values())


def stage_of(position: int, count: int) -> int:
    """The stage of the version at `position` (0 goes first) of `count` that may go."""
    assert 0 <= position < count
    return count - position


def going_stage(forgotten: int, count: int) -> int:
    """The lowest stage that is free once the first `forgotten` of `count` versions have gone."""
    return count - forgotten + 1


def reference_to_tree(tree: TreeId) -> Reference:
    """A reference to a tree."""
    return Reference(Kind.TREE, tree)


def reference_to_recipe(recipe: RecipeId) -> Reference:
    """A reference to a file's content."""
    return Reference(Kind.RECIPE, recipe)
