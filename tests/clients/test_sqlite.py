"""SQLite in WAL mode: a shared mapping (`-shm`), fcntl locks, fsync, a log that is emptied by checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from asking import let_settle
from clients.clientproc import Client, named
from clients.recovery import Save, assert_all_recoverable, wait_until_recoverable
from clients.writepaths import BOTH_PATHS
from mounting import Mount

ROWS_EACH = 20
FOR_EVER = "1000000"


@BOTH_PATHS
def test_several_writers_and_a_reader_share_a_database(quick_mount: Mount) -> None:
    """The reader sees whole transactions only, and never fewer than before."""
    path, batches = database_in(quick_mount), 30
    # One makes it: SQLite waits for nobody while it turns a new database into one with a WAL.
    with sqlite_job(path, "zero", "1") as writer:
        writer.finish()
    with contextlib.ExitStack() as stack:
        names = ("one", "two", "three")
        writers = [stack.enter_context(sqlite_job(path, name, str(batches))) for name in names]
        assert all(writer.next_line() for writer in writers)
        seen: Mapping[str, int] = {}
        with reading(path) as database:
            while any(writer.is_running() for writer in writers):
                now = committed(database)
                assert all(now[name] >= batch for name, batch in seen.items())
                seen = now
        assert all(named(writer.finish(), "done") for writer in writers)
    with reading(path) as database:
        assert committed(database) == {"zero": 1, **dict.fromkeys(names, batches)}
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@BOTH_PATHS
def test_what_was_committed_survives_a_kill_of_the_writer(quick_mount: Mount) -> None:
    path, total = database_in(quick_mount), 0
    for _ in range(3):
        with sqlite_job(path, "job", FOR_EVER, first=total + 1) as writer:
            last = batches_said(writer, 25)
        total = assert_whole(path, at_least=last)


@BOTH_PATHS
def test_what_was_committed_survives_a_kill_of_the_daemon(quick_mount: Mount) -> None:
    """The writer loses its mount in some transaction; the next one finds each that was answered."""
    path = database_in(quick_mount)
    with sqlite_job(path, "job", FOR_EVER) as writer:
        last = batches_said(writer, 40)
        quick_mount.kill9()
    quick_mount.restart()
    total = assert_whole(path, at_least=last)
    with sqlite_job(path, "job", "5", first=total + 1) as writer:
        writer.finish()
    assert assert_whole(path, at_least=total) == total + 5


@BOTH_PATHS
def test_each_backup_and_each_state_that_was_closed_can_be_had_back(
    quick_mount: Mount, tmp_path: Path
) -> None:
    """The database grows in place from job to job; each job also leaves a backup, of which two are kept."""
    path = database_in(quick_mount)
    run = path.parent
    saves = []
    for job in range(1, 5):
        with sqlite_job(path, "job", "10", first=10 * job - 9) as writer:
            writer.finish()
        with reading(path) as database:
            database.execute("VACUUM INTO ?", (str(run / f"backup-{job}.db"),))
        saves += [Save.of(run, f"backup-{job}.db"), Save.of(run, path.name)]
        wait_until_recoverable(quick_mount, "run", saves[-1])
        (run / f"backup-{job - 2}.db").unlink(missing_ok=True)
    shutil.rmtree(run)
    assert_all_recoverable(quick_mount, "run", saves)
    for number, save in enumerate(saves):
        version = wait_until_recoverable(quick_mount, "run", save)
        shutil.copy(quick_mount.history("run") / version / save.path, tmp_path / "copy.db")
        assert assert_whole(tmp_path / "copy.db", at_least=0) == 10 * (number // 2 + 1)
    assert quick_mount.verified("run")


@BOTH_PATHS
def test_no_version_holds_a_database_and_a_log_that_do_not_belong_together(
    quick_mount: Mount, tmp_path: Path, rng: random.Random
) -> None:
    """Jobs come and go while versions are made, some of them on demand and while the file is open."""
    path, total = database_in(quick_mount), 0
    for number in range(9):
        batches = rng.randrange(1, 20)
        with sqlite_job(path, "job", str(batches), first=total + 1) as writer:
            batches_said(writer, 1)
            quick_mount.cli("publish", str(path.parent), check=False)
            writer.finish()
        total += batches
        if number % 3 == 0:
            let_settle(quick_mount.settle_s)
    wait_until_recoverable(quick_mount, "run", Save.of(path.parent, path.name))
    versions = [quick_mount.history("run") / name for name in quick_mount.version_names("run")]
    found = [transactions_in(version, tmp_path / version.name) for version in versions]
    assert found == sorted(found) and found[-1] == total, found
    assert len(set(found)) > 2, found


def transactions_in(version: Path, scratch: Path) -> int:
    """How many transactions the database of a version has, with the log that lies beside it; 0 if none."""
    shutil.copytree(version, scratch)
    (scratch / "metrics.db-shm").unlink(missing_ok=True)
    database = scratch / "metrics.db"
    return assert_whole(database, at_least=1) if database.exists() else 0


def database_in(mount: Mount) -> Path:
    (mount.path / "run").mkdir()
    return mount.path / "run" / "metrics.db"


def sqlite_job(path: Path, writer: str, batches: str, *, first: int = 1) -> Client:
    return Client("sqlite_job.py", str(path), writer, "--first", str(first), "--batches", batches)


def batches_said(writer: Client, count: int) -> int:
    """The number of the last of the next `count` transactions that were answered."""
    said = [writer.next_line() for _ in range(count)]
    assert said[-1] is not None
    return int(str(said[-1]["batch"]))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    database = sqlite3.connect(path, timeout=30.0, isolation_level=None)
    try:
        yield database
    finally:
        database.close()


def committed(database: sqlite3.Connection) -> Mapping[str, int]:
    """How many transactions of each writer there are; each must be whole and its values right."""
    rows: Counter[str] = Counter()
    for writer, batch, number, value in database.execute("SELECT writer, batch, number, value FROM metrics"):
        assert value == hashlib.sha256(f"{writer} {batch} {number}".encode()).digest() * 8
        rows[writer] += 1
    assert all(count % ROWS_EACH == 0 for count in rows.values()), rows
    return {writer: count // ROWS_EACH for writer, count in rows.items()}


def assert_whole(path: Path, *, at_least: int) -> int:
    """The number of transactions of `job` in an intact database."""
    with reading(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        found = committed(database).get("job", 0)
    assert found >= at_least, f"{found} transactions of {at_least} that were answered"
    return found
