"""left_open: what a test leaves open is closed in its own thread, and its lock can be taken again."""

from __future__ import annotations

from pathlib import Path

import left_open

from ckptfs.store.disk import Disk
from ckptfs.store.index import Index


def test_an_index_that_is_left_open_is_closed(tmp_path: Path) -> None:
    before, disk = left_open.opened(), Disk(str(tmp_path))
    index = Index(disk)
    assert left_open.opened() - before == {index}
    left_open.close({index})
    assert left_open.opened() == before
    Index(disk).close()
    assert left_open.opened() == before
