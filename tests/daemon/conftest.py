"""A small store for the tests that need one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from filled_store import FilledStore


@pytest.fixture
def filled_store(tmp_path: Path) -> Iterator[FilledStore]:
    """An open store with an empty live tree; closed after the test."""
    store = FilledStore(tmp_path)
    yield store
    store.close()
