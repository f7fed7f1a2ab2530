"""Tensors of a torch.save file in the format before 1.6: five pickles, then the storages.

One rule: the storages lie one after the other and only the pickled persistent ids say how long an
element is, so the first storage that does not agree with its id ends the list.

Source: `_legacy_save` in torch/serialization.py: magic number, protocol version, system facts, the
object, the sorted storage keys; then for each key an i64 count of elements and the elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ckptfs.store.formats.layout import Layout, Reader, Tensor, arrange, read_exactly, shown, tensor
from ckptfs.store.formats.pickle_values import Pairs, Unwalkable
from ckptfs.store.formats.pickle_walk import MAX_PICKLE_BYTES, StepBudget, Walker
from ckptfs.store.formats.torch_objects import name_storages

NAME: Final = "torch-legacy"
_MAGIC: Final = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_FIRST_READ_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Prologue:
    """What the pickles say, and where they end."""

    root: object
    keys: list[str]
    little_endian: bool
    end: int


def recognise(first_bytes: bytes) -> bool:
    """Tell whether the first pickle is torch's magic number."""
    return first_bytes.startswith(b"\x80") and _MAGIC in first_bytes[:32]


def parse(reader: Reader) -> Layout | None:
    """Return the layout; None when the file is of another format or its pickles are beyond us."""
    if not recognise(reader.pread(0, 32)):
        return None
    prologue = _read_prologue(reader)
    if isinstance(prologue, str):
        return Layout(NAME, (), prologue)
    if prologue is None:
        return None
    tensors, damage = _storages(reader, prologue)
    return arrange(NAME, reader.size, tensors, damage)


def read_object(reader: Reader) -> object:
    """Return the walked object of a torch file, or None."""
    prologue = _read_prologue(reader)
    return prologue.root if isinstance(prologue, _Prologue) else None


def _read_prologue(reader: Reader) -> _Prologue | str | None:
    """Return what the pickles say; a sentence if they end too early, None if they are beyond us."""
    # The pickles state no length. Each attempt reads eight times as much, so all of them
    # together cost little more than the last.
    length = _FIRST_READ_BYTES
    while True:
        head = reader.pread(0, min(length, reader.size))
        walker = Walker(head, StepBudget())
        try:
            return _walk(walker)
        except Unwalkable:
            if walker.position < len(head):
                return None
            if len(head) == reader.size:
                return "truncated in its pickles"
            if length >= MAX_PICKLE_BYTES:
                return None
            length *= 8


def _walk(walker: Walker) -> _Prologue:
    walker.next()
    walker.next()
    system, root, keys = walker.next(), walker.next(), walker.next()
    if not isinstance(system, Pairs) or not isinstance(keys, list):
        raise Unwalkable("not the pickles that torch writes")
    little = [value for key, value in system if isinstance(key, str) and key == "little_endian"]
    names = [key for key in keys if isinstance(key, str)]
    return _Prologue(root, names, little != [False], walker.position)


def _storages(reader: Reader, prologue: _Prologue) -> tuple[list[Tensor], str | None]:
    tensors: list[Tensor] = []
    uses = name_storages(prologue.root)
    at = prologue.end
    for index, key in enumerate(prologue.keys):
        use = uses.get(key)
        if use is None:
            return tensors, f"storage {shown(key)} belongs to no tensor"
        raw = read_exactly(reader, at, 8)
        if raw is None or at + 8 + use.storage_bytes > reader.size:
            return tensors, f"truncated: storage {shown(use.name)} is not whole"
        if int.from_bytes(raw, "little", signed=True) != use.elements:
            return tensors, f"storage {shown(use.name)} has another length than its tensor"
        dtype = use.dtype if prologue.little_endian else "U8"
        # Keys are addresses in the writer's memory and no use as a name.
        name = use.name or f"data/{index}"
        tensors.append(tensor(name, at + 8, use.storage_bytes, dtype, use.shape))
        at += 8 + use.storage_bytes
    if at < reader.size:
        return tensors, f"{reader.size - at} trailing bytes after the last storage"
    return tensors, None
