"""A local vector database: LanceDB tables of vectors, appended to, compacted, cleaned of their old versions.

The rows of a step are a function of it.
"""

from __future__ import annotations

from datetime import timedelta

import lancedb
import numpy as np
from protocol import serve

DIMENSIONS, ROWS = 32, 2000
TABLE = "vectors"


def rows_of(step: int) -> list[dict[str, object]]:
    vectors = np.random.default_rng(step).random((ROWS, DIMENSIONS), np.float32)
    return [{"id": step * ROWS + number, "vector": vector} for number, vector in enumerate(vectors)]


def append(path: str, step: int) -> None:
    """Add the rows of that step; the first one makes the table."""
    database = lancedb.connect(path)
    if step == 1:
        database.create_table(TABLE, rows_of(step))
    else:
        database.open_table(TABLE).add(rows_of(step))


def compact(path: str) -> None:
    """Rewrite the fragments into one and remove every older version of the table."""
    lancedb.connect(path).open_table(TABLE).optimize(cleanup_older_than=timedelta(0), delete_unverified=True)


def check(path: str, steps: int) -> bool:
    """Whether the table holds the rows of steps 1 to `steps`, and a search finds each step's first row."""
    table = lancedb.connect(path).open_table(TABLE)
    if table.count_rows() != steps * ROWS:
        return False
    for step in range(1, steps + 1):
        first = rows_of(step)[0]
        found = table.search(first["vector"]).limit(1).to_list()[0]
        if found["id"] != first["id"] or not np.array_equal(found["vector"], first["vector"]):
            return False
    return True


if __name__ == "__main__":
    serve({"append": append, "compact": compact, "check": check})
