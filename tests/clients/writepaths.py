"""Marks for tests that must hold on both ways to the staging file: through the daemon, and past it."""

from __future__ import annotations

import pytest

WRITE_PATHS = [
    pytest.param({"write_path": "auto"}, id="passthrough"),  # plain where kernel or rights do not allow it
    pytest.param({"write_path": "plain"}, id="plain"),
]
BOTH_PATHS = pytest.mark.parametrize("quick_mount", WRITE_PATHS, indirect=True)
BOTH_PATHS_SMALL = pytest.mark.parametrize("small_mount", WRITE_PATHS, indirect=True)
