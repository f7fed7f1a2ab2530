"""Which chunks a chunk may be encoded against: the same part of the same tensor in an earlier save.

One rule: a plan only proposes. A parent that is not what it is taken for costs room, never bytes: the encoder
keeps what is smallest, and a reader compares what comes out with the chunk id.

Tensors are the same if they are called the same, apart from what frameworks put in front, and have the same
shape and dtype. Files are the same if their paths are, apart from the step in them. Parents come from earlier
saves only, so no chunk can come to lead to itself.

Source: FORMAT.md, "Encoded chunks"; the cut points of `regions`, which put the k-th chunk of a tensor at the
same place in every save.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from ckptfs.store.formats import Layout, Tensor
from ckptfs.store.ids import ChunkId
from ckptfs.store.recipe import Recipe

_STEP: Final = re.compile(
    r"(?<![a-z])(global_?steps?|steps?|iter(?:ation)?|checkpoint|ckpt|epoch)([-_=]?)\d{1,18}(?!\d)", re.I
)
_DIGITS: Final = re.compile(r"\d+$")
_PREFIXES: Final = re.compile(
    r"^(?:(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_model|model|state_dict"
    r"|model_state_dict|net|ema|ema_model|shadow_params|params|app)\.)+"
)
_AVERAGE: Final = re.compile(r"(?:^|[._])(?:ema|shadow_params|average)", re.I)
_STORAGE: Final = re.compile(r"(?:data|constants)/")
_MAX_CASTS: Final = 3
_MEMORY: Final = 1 << 15


@dataclass(frozen=True, slots=True)
class Save:
    """The tensor files of one save by path. `number` orders saves without a step, and those of one step."""

    step: int | None
    number: int
    files: Mapping[str, Layout]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor in a file of a save. `save` counts from 0, the save itself, over the earlier ones."""

    save: int
    path: str
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a tensor may be encoded against: the nearest earlier one, and float32 ones of the same save."""

    parent: TensorPlace | None
    casts: tuple[TensorPlace, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A chunk of a file, the dtype of its values (None: of several), and what to encode it against."""

    chunk: ChunkId
    length: int
    dtype: str | None = None
    parent: ChunkId | None = None
    cast_of: tuple[ChunkId, ...] = ()


@lru_cache(maxsize=_MEMORY)
def path_key(path: str) -> str:
    """The path with every step in it left out: the same for one file of all saves of a run."""
    return _STEP.sub(r"\1\2#", path)


@lru_cache(maxsize=_MEMORY)
def path_step(path: str) -> int | None:
    """The last step that a path names."""
    found = [match[0] for match in _STEP.finditer(path)]
    return int(_DIGITS.search(found[-1])[0]) if found else None  # type: ignore[index]


@lru_cache(maxsize=_MEMORY)
def tensor_key(name: str) -> str:
    """A tensor's name without what frameworks and wrappers put in front of it."""
    return _PREFIXES.sub("", name) or name


def earlier_saves(save: Save, others: Iterable[Save]) -> list[Save]:
    """Those of `others` that `save` may have parents in, the nearest first: by step, then by number.

    A save without a step has them among its kind, by number: so "earlier" is an order, and has no circle.
    """
    kin = (other for other in others if (other.step is None) == (save.step is None))
    return sorted((other for other in kin if _order(other) < _order(save)), key=_order, reverse=True)


def _order(save: Save) -> tuple[int, int]:
    return save.step or 0, save.number


def match_save(save: Save, earlier: Sequence[Save]) -> dict[tuple[str, str], Candidates]:
    """For each tensor of `save`, by path and name, what it may be encoded against.

    `earlier` are its `earlier_saves`. Tensors without any candidate are left out.
    """
    known = [_Names(number, one) for number, one in enumerate([save, *earlier])]
    found: dict[tuple[str, str], Candidates] = {}
    for path, layout in save.files.items():
        for tensor in layout.tensors:
            places = (names.find(path, tensor) for names in known[1:])
            parent = next((place for place in places if place is not None), None)
            casts = tuple(known[0].casts(path, tensor))
            if parent is not None or casts:
                found[path, tensor.name] = Candidates(parent, casts)
    return found


_Form = tuple[str, tuple[int, ...]]


class _Names:
    """The tensors of one save by what they are called."""

    __slots__ = ("_by_key", "_by_path")

    def __init__(self, number: int, save: Save) -> None:
        self._by_path: dict[tuple[str, str, _Form], TensorPlace] = {}
        self._by_key: dict[tuple[str, _Form], list[TensorPlace]] = {}
        for path in sorted(save.files):
            for tensor in save.files[path].tensors:
                place = TensorPlace(number, path, tensor)
                form = (tensor.dtype, tensor.shape)
                self._by_path.setdefault((path_key(path), tensor.name, form), place)
                # A storage's own number says which tensor it is within its file only.
                if not _STORAGE.match(tensor.name):
                    self._by_key.setdefault((tensor_key(tensor.name), form), []).append(place)

    def find(self, path: str, tensor: Tensor) -> TensorPlace | None:
        """The tensor of the same file and name, else the likeliest of those called nearly the same."""
        form = (tensor.dtype, tensor.shape)
        same = self._by_path.get((path_key(path), tensor.name, form))
        if same is not None or _STORAGE.match(tensor.name):
            return same
        return next(iter(self._likeliest(path, tensor, form)), None)

    def casts(self, path: str, tensor: Tensor) -> list[TensorPlace]:
        """The float32 tensors that a bfloat16 tensor may be the cast of, the likeliest first."""
        if tensor.dtype != "BF16":
            return []
        return self._likeliest(path, tensor, ("F32", tensor.shape))[:_MAX_CASTS]

    def _likeliest(self, path: str, tensor: Tensor, form: _Form) -> list[TensorPlace]:
        def unlikeness(place: TensorPlace) -> tuple[bool, bool, bool, str, str]:
            name = place.tensor.name
            is_average = _AVERAGE.search(name) is not None
            other_file = path_key(place.path) != path_key(path)
            return other_file, name != tensor.name, is_average, place.path, name

        return sorted(self._by_key.get((tensor_key(tensor.name), form), ()), key=unlikeness)


def plan_file(
    recipe: Recipe,
    layout: Layout | None,
    candidates: Mapping[str, Candidates],
    recipe_of: Mapping[tuple[int, str], Recipe],
    cast_choice: int = 0,
) -> Iterator[PlannedChunk]:
    """Every chunk of a file in order, holes left out, with what to encode it against.

    `candidates` are those of the file's tensors by name, `recipe_of` the recipes by save (as in TensorPlace)
    and path; what has none is not used. `cast_choice` says which of the casts is proposed.
    """
    tensors = iter(layout.tensors if layout is not None else ())
    tensor = next(tensors, None)
    for index in range(len(recipe)):
        piece, start = recipe.piece(index), recipe.start(index)
        if piece.chunk is None:
            continue
        while tensor is not None and tensor.end <= start:
            tensor = next(tensors, None)
        if tensor is None or start < tensor.offset or start + piece.length > tensor.end:
            yield PlannedChunk(piece.chunk, piece.length)
            continue
        found = candidates.get(tensor.name, Candidates(None))
        at = start - tensor.offset
        parent = _covering(found.parent, recipe_of, at, piece.length)
        cast = found.casts[cast_choice] if cast_choice < len(found.casts) else None
        cast_of = _covering(cast, recipe_of, 2 * at, 2 * piece.length)
        yield PlannedChunk(
            piece.chunk,
            piece.length,
            tensor.dtype,
            parent[0] if len(parent) == 1 and parent[0] != piece.chunk else None,
            cast_of if len(cast_of) <= 2 and piece.chunk not in cast_of else (),
        )


def _covering(
    place: TensorPlace | None, recipe_of: Mapping[tuple[int, str], Recipe], at: int, length: int
) -> tuple[ChunkId, ...]:
    """The chunks that are exactly [at, at + length) of a tensor; empty if no chunks are."""
    recipe = recipe_of.get((place.save, place.path)) if place is not None else None
    if place is None or recipe is None or at + length > place.tensor.length:
        return ()
    start, end = place.tensor.offset + at, place.tensor.offset + at + length
    if end > recipe.size:
        return ()
    index = recipe.index_at(start)
    chunks: list[ChunkId] = []
    while start < end:
        piece = recipe.piece(index)
        if recipe.start(index) != start or piece.chunk is None or start + piece.length > end:
            return ()
        chunks.append(piece.chunk)
        start += piece.length
        index += 1
    return tuple(chunks)
