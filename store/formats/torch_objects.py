"""Which tensor each storage of a torch file belongs to, from the walked pickle.

One rule: a storage is named once, by the first tensor that refers to it, in the order in which the
file's objects were written; views and tied weights do not make a second extent.

Source: torch/_utils.py (`_rebuild_tensor_v2` and its kin) and torch/serialization.py (the
persistent ids `("storage", type, key, location, numel)`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ckptfs.store.formats.layout import DTYPE_BITS, MAX_DIMENSIONS, element_count
from ckptfs.store.formats.pickle_values import Global, Made, Pairs, Persistent

MAX_DEPTH: Final = 128
MAX_COMPONENT: Final = 200
MAX_ARGUMENTS: Final = 16
"""A longer argument tuple is visited once, as a value: many objects could share it."""

_STORAGE_DTYPES: Final = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "C128",
    "QInt8Storage": "I8",
    "QUInt8Storage": "U8",
    "QInt32Storage": "I32",
    "UntypedStorage": "U8",
}
TORCH_DTYPES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex64": "C64",
    "complex128": "C128",
}
_FROM_TYPE: Final = Global("torch._tensor", "_rebuild_from_type_v2")
_REBUILDERS: Final = frozenset({"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"})


# What torch.nn.Module keeps its tensors and children in; no part of a state dict's names.
_UNNAMED: Final = frozenset({"_modules", "_parameters", "_buffers"})


@dataclass(frozen=True, slots=True)
class StorageUse:
    """How a storage is used; `spans` if a tensor of that dtype and shape fills it exactly.

    `elements` is the storage's own length, counted in its storage type.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    storage_bytes: int
    spans: bool


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value was found: in what, and under which key (None adds nothing to the name)."""

    parent: _Place | None
    key: object
    depth: int

    def below(self, key: object) -> _Place:
        return _Place(self, None if isinstance(key, str) and key in _UNNAMED else key, self.depth + 1)

    def name(self) -> str:
        parts: list[str] = []
        place: _Place | None = self
        while place is not None:
            if isinstance(place.key, str):
                parts.append(place.key[:MAX_COMPONENT])
            elif place.key is not None:
                parts.append(str(place.key) if isinstance(place.key, int) else "?")
            place = place.parent
        return ".".join(reversed(parts))


def name_storages(root: object) -> dict[str, StorageUse]:
    """Return the use of each storage that `root` reaches, by the storage's key, in their order.

    Takes time and memory linear in the objects reached; below `MAX_DEPTH` nothing is looked for.
    """
    uses: dict[str, StorageUse] = {}
    seen: set[int] = set()
    pending = [(root, _Place(None, None, 0))]
    while pending:
        node, place = pending.pop()
        if isinstance(node, Persistent):
            _note(uses, _storage_use(node, place))
            continue
        if not isinstance(node, list | tuple | Made) or id(node) in seen:
            continue
        seen.add(id(node))
        rebuilt = _rebuild_arguments(node) if isinstance(node, Made) else None
        if rebuilt is not None:
            _note(uses, _tensor_use(rebuilt, place))
        elif place.depth < MAX_DEPTH:
            pending += reversed(_children(node, place))
    return uses


def _note(uses: dict[str, StorageUse], found: tuple[str, StorageUse] | None) -> None:
    if found is None:
        return
    key, use = found
    known = uses.setdefault(key, use)
    # The first name stays, but a later tensor may be the one that fills the storage.
    if use.spans and not known.spans:
        uses[key] = replace(use, name=known.name)


def _children(node: list[object] | tuple[object, ...] | Made, place: _Place) -> list[tuple[object, _Place]]:
    if isinstance(node, Made):
        # What an object is made of keeps the object's own name.
        below = place.below(None)
        parts: list[object] = [node.elements, node.pairs, node.state]
        if isinstance(node.arguments, tuple) and len(node.arguments) <= MAX_ARGUMENTS:
            return [(part, below) for part in (*node.arguments, *parts)]
        return [(part, below) for part in (node.arguments, *parts)]
    if isinstance(node, Pairs):
        return [(value, place.below(key)) for key, value in node]
    return [(value, place.below(index)) for index, value in enumerate(node)]


def _rebuild_arguments(node: Made) -> tuple[object, ...] | None:
    """Return storage, offset, size, stride, … when the object is a tensor."""
    called, arguments = node.called, node.arguments
    if not isinstance(called, Global) or not isinstance(arguments, tuple):
        return None
    if called == _FROM_TYPE and len(arguments) >= 3 and isinstance(arguments[2], tuple):
        called, _, arguments = arguments[:3]
    if not isinstance(called, Global) or called.module != "torch._utils":
        return None
    if called.name not in _REBUILDERS or len(arguments) < 4:
        return None
    return arguments


def _storage_use(storage: object, place: _Place) -> tuple[str, StorageUse] | None:
    """Return key and use of a storage of which nothing more is known."""
    pid = storage.pid if isinstance(storage, Persistent) else None
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
        return None
    _, kind, key, _, count = pid[:5]
    if not isinstance(kind, Global) or not isinstance(key, str) or not isinstance(count, int):
        return None
    dtype = _STORAGE_DTYPES.get(kind.name)
    if dtype is None or count < 0:
        return None
    length = count * DTYPE_BITS[dtype] // 8
    return key, StorageUse(place.name(), dtype, (count,), count, length, spans=False)


def _tensor_use(arguments: tuple[object, ...], place: _Place) -> tuple[str, StorageUse] | None:
    found = _storage_use(arguments[0], place)
    if found is None:
        return None
    key, use = found
    dtype = use.dtype
    # _rebuild_tensor_v3 is for dtypes that have no storage type of their own.
    if len(arguments) >= 7 and isinstance(arguments[6], Global):
        dtype = TORCH_DTYPES.get(arguments[6].name, dtype)
    shape = _sizes(arguments[2])
    count = element_count(shape) if shape is not None else None
    item_bytes = DTYPE_BITS[dtype] // 8
    if shape is None or count is None or arguments[1] != 0:
        return key, use
    if count * item_bytes != use.storage_bytes or not _is_dense(shape, _sizes(arguments[3])):
        return key, replace(use, dtype=dtype, shape=(use.storage_bytes // item_bytes,))
    return key, replace(use, dtype=dtype, shape=shape, spans=True)


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, tuple) or len(value) > MAX_DIMENSIONS:
        return None
    sizes = tuple(item for item in value if type(item) is int and item >= 0)
    return sizes if len(sizes) == len(value) else None


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> bool:
    """Tell whether the elements lie in memory in the order of `shape`, without gaps."""
    if stride is None or len(stride) != len(shape):
        return False
    step = 1
    for size, jump in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and jump != step:
            return False
        step *= size
    return True


def top_level_numbers(root: object, wanted: frozenset[str]) -> dict[str, int]:
    """Return the integers that stand under the `wanted` keys of the saved dict itself.

    A key whose value is no integer gives 0: that it is there can be all one wants to know.
    """
    if not isinstance(root, Pairs):
        return {}
    found: dict[str, int] = {}
    for key, value in root:
        if isinstance(key, str) and key in wanted:
            found[key] = value if type(value) is int else 0
    return found
