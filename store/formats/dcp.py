"""Tensors of a shard (`__<rank>_<n>.distcp`) of a torch distributed checkpoint.

One rule: a shard is a row of torch.save archives, and `.metadata` only gives them names; without
it they are found from the last to the first, each archive saying where it begins.

Source: torch/distributed/checkpoint/filesystem.py (`_write_item`). Shards written with
`SerializationFormat.SAFETENSORS` are safetensors files and are parsed as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from ckptfs.store.formats import dcp_metadata, torch_zip
from ckptfs.store.formats.dcp_metadata import Extent
from ckptfs.store.formats.layout import Layout, Reader, Tensor, arrange
from ckptfs.store.formats.pickle_walk import StepBudget
from ckptfs.store.formats.zip_records import Archive, find_archive, read_records

NAME: Final = "dcp"
SUFFIX: Final = ".distcp"
MAX_ARCHIVES: Final = 100_000
"""Finding and walking one takes some 0.2 ms; beyond this the rest of a shard is no tensor's."""


def parse_metadata(reader: Reader) -> Layout:
    """Return the layout of a `.metadata` file: it has no tensors, but it can be damaged."""
    whole = dcp_metadata.read_shards(reader) is not None
    return Layout(NAME, (), None if whole else "truncated or unreadable")


def parse_shard(reader: Reader, name: str, sibling: Callable[[str], Reader | None] | None) -> Layout | None:
    """Return the layout of a shard, or None when it holds no torch archive at all."""
    extents = _extents(name, sibling)
    archives: list[tuple[str, Archive]]
    if extents:
        archives = list(_named_archives(reader, extents))
        expected = max(extent.offset + extent.length for extent in extents)
        damage = length_damage(reader.size, expected)
    else:
        found = list(_archives_from_the_end(reader))
        archives = [(str(index), archive) for index, archive in enumerate(reversed(found))]
        begins = found[-1].start if found else reader.size
        damage = None
        if begins and len(found) < MAX_ARCHIVES:
            damage = f"the first {begins} bytes are no whole archive"
        if not found and not torch_zip.recognise(reader.pread(0, 64)):
            return None
    return arrange(NAME, reader.size, _tensors(reader, archives), damage)


def parse_row(reader: Reader) -> Layout | None:
    """Return the layout of a row of torch archives, whatever the file is called and lies beside.

    None if no archive ends the file, if one is all of it, or if they hold no tensor.
    """
    found = list(_archives_from_the_end(reader))
    begins = found[-1].start if found else 0
    if not begins and len(found) < 2:
        return None
    archives = [(str(index), archive) for index, archive in enumerate(reversed(found))]
    damage = f"the first {begins} bytes are no whole archive" if begins else None
    layout = arrange(NAME, reader.size, _tensors(reader, archives), damage)
    return layout if layout.tensors else None


def length_damage(size: int, expected: int) -> str | None:
    """Return what is wrong with a shard of `size` bytes when `.metadata` names `expected`."""
    if size < expected:
        return f"truncated: {size} bytes of {expected}"
    if size > expected:
        return f"{size - expected} bytes more than .metadata names"
    return None


def _extents(name: str, sibling: Callable[[str], Reader | None] | None) -> tuple[Extent, ...] | None:
    if sibling is None:
        return None
    rank = name.removeprefix("__").partition("_")[0]
    # Writers without collectives commit each rank by a file of its own.
    for metadata_name in (dcp_metadata.FILE_NAME, f"__{rank}{dcp_metadata.FILE_NAME}"):
        reader = sibling(metadata_name)
        shards = dcp_metadata.read_shards(reader) if reader is not None else None
        if shards is not None and shards.extents.get(name):
            return shards.extents[name]
    return None


def _named_archives(reader: Reader, extents: tuple[Extent, ...]) -> Iterator[tuple[str, Archive]]:
    end = 0
    for extent in extents[:MAX_ARCHIVES]:
        # Extents that overlap would be read more than once.
        if extent.offset < end or extent.offset + extent.length > reader.size:
            continue
        end = extent.offset + extent.length
        archive = find_archive(reader, end, comment_bytes=0)
        if archive is not None and archive.start == extent.offset and archive.end == end:
            yield extent.name, archive


def _archives_from_the_end(reader: Reader) -> Iterator[Archive]:
    end = reader.size
    for _ in range(MAX_ARCHIVES):
        archive = find_archive(reader, end, comment_bytes=0) if end > 0 else None
        if archive is None or archive.end != end:
            return
        yield archive
        end = archive.start


def _tensors(reader: Reader, archives: list[tuple[str, Archive]]) -> Iterator[Tensor]:
    budget = StepBudget()
    for name, archive in archives:
        records = read_records(reader, archive)
        storages = torch_zip.storages(reader, records, budget) if records is not None else None
        for index, one in enumerate(storages or ()):
            # A tensor is saved alone; only an object that is no tensor has several storages.
            full = name if index == 0 else f"{name}.{index}"
            yield Tensor(full, one.offset, one.length, one.dtype, one.shape)
