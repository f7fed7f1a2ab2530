"""Records of the history that say something of contents: one map key, a row for each content, rising.

One rule: a record has one encoding. Source: FORMAT.md, "Digests" and "Health".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from ckptfs.store.dagcbor import Node
from ckptfs.store.errors import Corrupt
from ckptfs.store.history import checked_map
from ckptfs.store.ids import RecipeId

T = TypeVar("T")


def rows_by_content(
    encoded: bytes, key: str, most: int, row_of: Callable[[Node], tuple[RecipeId, T]]
) -> dict[RecipeId, T]:
    """The 1 to `most` contents of a record whose one key this is, each by `row_of`; Corrupt unless they are
    canonical and rise."""
    rows = cast("list[Node]", checked_map(encoded, {key: (list,)}, f"{key} record")[key])
    if not 0 < len(rows) <= most:
        raise Corrupt(f"a {key} record lists {len(rows)} contents")
    contents: dict[RecipeId, T] = {}
    before = b""
    for row in rows:
        recipe, content = row_of(row)
        if recipe <= before:
            raise Corrupt(f"the contents of a {key} record do not rise")
        contents[recipe], before = content, recipe
    return contents
