"""store/neighbours.py: read together or alone, a payload is the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt
from ckptfs.store.neighbours import Neighbours
from ckptfs.store.segment_files import SegmentFiles
from ckptfs.store.segment_format import Codec, Location, segment_paths

SIZE = 3 << 20


class CountedDisk(Disk):
    """How many reads there were."""

    reads = 0

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        self.reads += 1
        return super().pread(fd, length, offset)

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.reads += 1
        return super().read_into(fd, buffer, offset)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[CountedDisk]:
    one = CountedDisk(str(tmp_path))
    for number in (1, 2):
        for path in segment_paths(number):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes(random.Random(path).randbytes(SIZE))
    yield one


def place(offset: int, stored: int, segment: int = 1, flags: int = 0) -> Location:
    return Location(segment, offset, stored, 2 * stored, Codec.PLANES, flags)


def test_neighbours_are_read_in_one_go(disk: CountedDisk) -> None:
    files = SegmentFiles(disk)
    places = [place(100_000 * at, 96_000 + 3_000 * (at % 2)) for at in range(10)]
    read = [*map(Neighbours(files, places).payload, places)]
    assert disk.reads == 1, "what lies between them is less than a page"
    files.close()
    whole = (Path(disk.root) / segment_paths(1)[0]).read_bytes()
    assert [*map(bytes, read)] == [whole[one.offset : one.offset + one.stored] for one in places]


def test_each_is_what_a_read_of_it_alone_gives(disk: CountedDisk) -> None:
    """In any order, also asked for twice, unforeseen, overlapping, or where the file ends before."""
    draw = random.Random(7)
    for _ in range(50):
        sizes = [draw.choice([0, 1, 4000, 300_000, 2_500_000, 1 << 31]) for _ in range(12)]
        starts = [draw.choice([0, 5, SIZE - 400_000, SIZE, 1 << 63, draw.randrange(SIZE)]) for _ in sizes]
        places = [
            place(start, size, draw.choice([1, 2, 3]), draw.randrange(2))
            for start, size in zip(starts, sizes, strict=True)
        ]
        files, alone = SegmentFiles(disk), SegmentFiles(disk)
        neighbours = Neighbours(files, places[:10])
        for one in draw.choices(places, k=20):
            try:
                expected = alone.pread(one.segment, one.in_idx, one.stored, one.offset)
            except Corrupt:
                with pytest.raises(Corrupt):
                    neighbours.payload(one)
            else:
                assert bytes(neighbours.payload(one)) == expected
        files.close()
        alone.close()
