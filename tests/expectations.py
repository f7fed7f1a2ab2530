"""What to expect of files that lie in memory: cut and described as the daemon does it, with no store.

The one rule: digests come from PyPI `blake3` over the bytes themselves.
"""

from __future__ import annotations

import io
from collections.abc import Mapping

import torch
from blake3 import blake3
from bytes_reader import BytesReader

from ckptfs.gpu.expected import Expectation, ExpectedFile, ExpectedTensor, edges_of
from ckptfs.store.formats import Reader, parse
from ckptfs.store.ids import ChunkId
from ckptfs.store.recipe import Piece, Recipe
from ckptfs.store.regions import Mode, cut_content, cut_fixed, plan_regions


def digest(content: bytes) -> ChunkId:
    return ChunkId(blake3(content).digest())


def expectation_of(files: Mapping[str, bytes]) -> Expectation:
    """What the daemon would say of a version with these files."""

    def described(path: str) -> ExpectedFile | None:
        def sibling(name: str) -> Reader | None:
            content = files.get(f"{path.rpartition('/')[0]}/{name}".lstrip("/"))
            return None if content is None else BytesReader(content)

        layout = parse(BytesReader(files[path]), path, sibling)
        if layout is None or not layout.tensors:
            return None
        recipe = _cut(files[path])
        tensors = []
        for one in layout.tensors:
            edges = [
                digest(files[path][at : at + length]) for at, length in edges_of(recipe, one.offset, one.end)
            ]
            tensors.append(
                ExpectedTensor(one.name, one.offset, one.length, one.dtype, one.shape, b"".join(edges))
            )
        return ExpectedFile(path, layout.format, recipe.encode(), tuple(tensors), layout.damage)

    found = [one for path in files if (one := described(path)) is not None]
    return Expectation(unit="run", number=1, name="v000001", path=None, files=tuple(found))


def torch_file(state: object) -> bytes:
    """The bytes of torch.save."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _cut(content: bytes) -> Recipe:
    pieces: list[Piece] = []
    for region in plan_regions(len(content), parse(BytesReader(content), "x")):
        held = content[region.offset : region.offset + region.length]
        at = 0
        for length in cut_fixed(len(held)) if region.mode is Mode.FIXED else cut_content(held):
            pieces.append(Piece(length, digest(held[at : at + length])))
            at += length
    return Recipe(pieces)
