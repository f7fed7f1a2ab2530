"""A vector search service with faiss: writes indexes, searches them through mappings, grows one on disk.

The vectors of a step are a function of it: whoever searches can compute in memory what should come out.
"""

from __future__ import annotations

import os
from pathlib import Path

import faiss
import numpy as np
from protocol import serve

DIMENSIONS, LISTS, VECTORS, NEIGHBOURS = 32, 16, 4000, 5
HELD: dict[str, faiss.Index] = {}


def vectors_at(step: int) -> np.ndarray:
    return np.random.default_rng(step).random((VECTORS, DIMENSIONS), np.float32)


def index_after(steps: int) -> faiss.IndexIVFFlat:
    """An index in memory that holds the vectors of steps 1 to `steps`."""
    quantizer = faiss.IndexFlatL2(DIMENSIONS)
    index = faiss.IndexIVFFlat(quantizer, DIMENSIONS, LISTS)
    index.train(vectors_at(0))
    for step in range(1, steps + 1):
        index.add(vectors_at(step))
    return index


def save(path: str, step: int) -> None:
    """Write the index of that step beside the one at `path`, and rename it over that."""
    faiss.write_index(index_after(step), f"{path}.tmp")
    os.rename(f"{path}.tmp", path)


def resume(path: str, target: str, step: int) -> None:
    """Read the index of the step before, add the new vectors, write it to `target`."""
    index = faiss.read_index(path)
    index.add(vectors_at(step))
    faiss.write_index(index, target)


def hold(path: str) -> bool:
    """Map an index and keep it mapped. Whether it really is."""
    HELD[path] = faiss.read_index(path, faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    return path in Path("/proc/self/maps").read_text()


def check_held(path: str, step: int) -> bool:
    return _finds_the_same(HELD[path], step)


def start_on_disk(index_path: str, lists_path: str) -> None:
    """An empty index whose inverted lists lie in a file that is mapped for writing and grows."""
    index = index_after(0)
    lists = faiss.OnDiskInvertedLists(index.nlist, index.code_size, lists_path)
    index.replace_invlists(lists)
    index.add(vectors_at(1))
    faiss.write_index(index, index_path)


def grow_on_disk(index_path: str, step: int) -> None:
    """Add the vectors of a step to such an index."""
    index = faiss.read_index(index_path)
    index.add(vectors_at(step))
    faiss.write_index(index, index_path)


def check(path: str, step: int) -> bool:
    """Whether the index that a file holds answers as that of the step."""
    return _finds_the_same(faiss.read_index(path), step)


def _finds_the_same(index: faiss.Index, step: int) -> bool:
    queries = vectors_at(1000)[:50]
    wanted = index_after(step)
    for each in (wanted, index):
        each.nprobe = LISTS
    distances, numbers = index.search(queries, NEIGHBOURS)
    wanted_distances, wanted_numbers = wanted.search(queries, NEIGHBOURS)
    same = np.array_equal(numbers, wanted_numbers) and np.array_equal(distances, wanted_distances)
    return bool(same) and index.ntotal == wanted.ntotal


if __name__ == "__main__":
    operations = (save, resume, hold, check_held, start_on_disk, grow_on_disk, check)
    serve({operation.__name__: operation for operation in operations})
