"""An experiment tracker on SQLite in WAL mode: commits rows as fast as it can, waiting for others' locks.

Says `committed` after each transaction of ROWS_EACH rows that SQLite has reported as durable, and `done`.
"""

from __future__ import annotations

import argparse
import hashlib
import sqlite3

from protocol import emit

ROWS_EACH = 20
BUSY_S = 30.0


def open_database(path: str) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    mode = database.execute("PRAGMA journal_mode = WAL").fetchone()
    assert mode == ("wal",), mode
    database.execute("PRAGMA synchronous = FULL")
    database.execute("PRAGMA wal_autocheckpoint = 50")
    database.execute(
        "CREATE TABLE IF NOT EXISTS metrics (writer TEXT, batch INTEGER, number INTEGER, value BLOB)"
    )
    return database


def commit(database: sqlite3.Connection, writer: str, batch: int) -> None:
    """One transaction; `value` is a function of the rest, so that a reader can check it."""
    database.execute("BEGIN IMMEDIATE")
    for number in range(ROWS_EACH):
        value = hashlib.sha256(f"{writer} {batch} {number}".encode()).digest() * 8
        database.execute("INSERT INTO metrics VALUES (?, ?, ?, ?)", (writer, batch, number, value))
    database.execute("COMMIT")
    emit(event="committed", batch=batch)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("writer", help="a name for the rows of this process")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--batches", type=int, required=True)
    options = parser.parse_args()
    database = open_database(options.path)
    for batch in range(options.first, options.first + options.batches):
        commit(database, options.writer, batch)
    database.close()
    emit(event="done")


if __name__ == "__main__":
    main()
