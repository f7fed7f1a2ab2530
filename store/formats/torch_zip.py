"""Tensors of a torch.save file (zip): its `data/<k>` records, named by walking `data.pkl`.

One rule: the records alone say where bytes lie; the pickle only gives them names and shapes, and
where it cannot be walked, a storage is called by its record's name.

Source: torch/serialization.py and caffe2/serialize/inline_container.h. All records lie under one
folder that is called as the file was, which is therefore left out of the names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ckptfs.store.formats.layout import Layout, Reader, Tensor, arrange, read_exactly, tensor
from ckptfs.store.formats.pickle_values import Unwalkable
from ckptfs.store.formats.pickle_walk import MAX_PICKLE_BYTES, StepBudget, Walker
from ckptfs.store.formats.torch_objects import StorageUse, name_storages
from ckptfs.store.formats.zip_records import LOCAL_MAGIC, Record, find_archive, read_records

NAME: Final = "torch-zip"
_PICKLE: Final = "data.pkl"
# torch writes data.pkl first, since 1.6; TorchScript and older exports begin with another.
_FIRST_RECORDS: Final = (b"/data.pkl", b"/version", b"/byteorder", b"/.format_version", b"/data/")


def recognise(first_bytes: bytes) -> bool:
    """Tell whether a file that begins with `first_bytes` (about 64) was written by torch.save."""
    if not first_bytes.startswith(LOCAL_MAGIC) or len(first_bytes) < 30:
        return False
    length = int.from_bytes(first_bytes[26:28], "little")
    name = first_bytes[30 : 30 + length]
    # A long file name pushes the record's own name out of what was read.
    return any(record in name for record in _FIRST_RECORDS) or len(name) < length


def parse(reader: Reader) -> Layout | None:
    """Return the layout, or None when the file is no torch archive."""
    first = reader.pread(0, 1024)
    if not first.startswith(LOCAL_MAGIC):
        return None
    archive = find_archive(reader, reader.size)
    if archive is None:
        cut_off = recognise(first)
        return Layout(NAME, (), "truncated: no central directory at its end") if cut_off else None
    records = read_records(reader, archive)
    if records is None:
        return Layout(NAME, (), "central directory is broken") if recognise(first) else None
    tensors = storages(reader, records, StepBudget())
    if tensors is None:
        return None
    damage = None
    if archive.start > 0:
        damage = f"{archive.start} bytes before the archive"
    elif archive.end < reader.size:
        damage = f"{reader.size - archive.end} trailing bytes after the archive"
    return arrange(NAME, reader.size, tensors, damage)


def storages(reader: Reader, records: list[Record], budget: StepBudget) -> list[Tensor] | None:
    """Return one tensor per storage record, or None when there is no `<stem>/data.pkl`."""
    pickle = next((r for r in records if r.name.partition("/")[2] == _PICKLE), None)
    if pickle is None:
        return None
    stem = pickle.name[: -len(_PICKLE)]
    inside = {r.name.removeprefix(stem): r for r in records if r.name.startswith(stem)}
    uses = name_storages(_walked(reader, pickle, budget))
    big_endian = _text(reader, inside.get("byteorder")) == b"big"
    return list(_tensors(inside, uses, big_endian))


def _tensors(inside: dict[str, Record], uses: dict[str, StorageUse], big_endian: bool) -> Iterator[Tensor]:
    for name, record in inside.items():
        folder, _, key = name.rpartition("/")
        if folder != "data" and folder != "constants":
            continue
        use = uses.get(key) if folder == "data" else None
        if use is None:
            yield tensor(name, record.offset, record.length, "U8", (record.length,))
            continue
        dtype = "U8" if big_endian else use.dtype
        yield tensor(use.name or name, record.offset, record.length, dtype, use.shape)


def read_object(reader: Reader) -> object:
    """Return the walked object of a whole torch file, or None."""
    archive = find_archive(reader, reader.size)
    records = read_records(reader, archive, _is_pickle) if archive is not None else None
    pickle = next(iter(records or ()), None)
    return _walked(reader, pickle, StepBudget()) if pickle is not None else None


def _is_pickle(name: bytes) -> bool:
    return name.partition(b"/")[2] == _PICKLE.encode()


def _walked(reader: Reader, pickle: Record, budget: StepBudget) -> object:
    if pickle.length > MAX_PICKLE_BYTES:
        return None
    pickled = read_exactly(reader, pickle.offset, pickle.length)
    try:
        return Walker(pickled, budget).next() if pickled is not None else None
    except Unwalkable:
        return None


def _text(reader: Reader, record: Record | None) -> bytes:
    return reader.pread(record.offset, min(record.length, 16)) if record is not None else b""
