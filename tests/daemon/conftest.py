"""A small store for the tests that need one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_store import SmallStore


@pytest.fixture
def small_store(tmp_path: Path) -> Iterator[SmallStore]:
    """An open store with an empty live tree; closed after the test."""
    store = SmallStore(tmp_path)
    yield store
    store.close()
