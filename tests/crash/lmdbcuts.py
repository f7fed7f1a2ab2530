"""LMDB's own writes and syncs, cut at every point: what is opened is a committed state and its journal.

    python tests/crash/lmdbcuts.py [--seed N] [--changes 60] [--json FILE]

One rule: nothing is assumed of LMDB. Its system calls are recorded by strace(1) and replayed on the model of
a disk (diskmodel.py); after each cut the index is opened as the daemon opens it and compared, row by row,
with the state after some change: not before the last one that was synced or committed, not after the last
one that was begun. powercut.py takes a commit for one step; here is why it may.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

from disklog import ROOT, Event, FolderSynced, Mark, Names, Place, Resize, Synced, Write
from diskmodel import DiskModel
from faultdisk import SmallDisk, chance_of, materialise
from recording_run import memory_folder

from ckptfs.store.index import Change, Index, Table

KINDS = ("kill", "synced", "names", "bytes", "zeros", "torn512", "torn4096", "any", "any2", "any3")
_KIND = {"any2": "any", "any3": "any"}
_CALLS = "openat,pwrite64,pwritev,write,writev,lseek,fdatasync,fsync,ftruncate,mkdir,rename"
_CALL = re.compile(r"^\d+ +(\w+)\((.*)\) = (-?\d+)(?:<(.*)>)?")
_FD = re.compile(r"^\d+<([^>]*)>")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_COMMIT_EVERY = 6
Rows = dict[tuple[int, bytes], bytes]


def changes(seed: str, count: int) -> list[Change]:
    """The changes of a run: small rows, large ones (pages of their own), and removals."""
    chance = chance_of(seed)
    known: list[tuple[Table, bytes]] = []
    made = []
    for number in range(count):
        change = Change()
        for _ in range(chance.randint(1, 6)):
            if known and chance.random() < 0.3:
                change.delete(*chance.choice(known))
                continue
            table, key = chance.choice((Table.CHUNK, Table.INODE, Table.ENTRY)), chance.randbytes(8)
            known.append((table, key))
            change.put(table, key, b"%d " % number + chance.randbytes(chance.choice((10, 200, 3000, 9000))))
        made.append(change)
    return made


def make(root: str, seed: str, count: int) -> None:
    """What is recorded: says on descriptor 1 what is begun, done, synced."""
    disk = SmallDisk(root)
    for folder in ("index", "journal", ""):  # as open_store leaves them
        disk.make_dir(folder)
    disk.sync_dir("")
    index = Index(disk)
    for number, change in enumerate(changes(seed, count), 1):
        os.write(1, b"begun %d" % number)
        is_synced = number % 4 == 0
        index.apply(change, sync=is_synced)
        os.write(1, b"done %d" % number)
        if number % _COMMIT_EVERY == 0:
            index.commit()
            is_synced = True
        if is_synced:
            os.write(1, b"synced %d" % number)
    index.close()
    os.write(1, b"synced %d" % count)


def traced(root: str, seed: str, count: int, trace: str) -> None:
    """Run `make` under strace."""
    program = [sys.executable, __file__, "--record", root, "--seed", seed, "--changes", str(count)]
    strace = ["strace", "-f", "-y", "-xx", "-s", str(1 << 22), "-o", trace, "-e", f"trace={_CALLS}"]
    subprocess.run([*strace, *program], check=True, stdout=subprocess.DEVNULL, timeout=300)


class Trace:
    """Turns the lines of a trace into the log of a disk."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._nodes = {"": ROOT}
        self._last = ROOT
        self._at: dict[str, int] = {}
        self._dsync: set[int] = set()

    def events(self, lines: Iterator[str]) -> Iterator[Event]:
        """The log."""
        for line in lines:
            found = _CALL.match(line)
            if found is not None and int(found[3]) >= 0:
                yield from self._events_of(found[1], found[2], int(found[3]), found[4] or "")

    def _events_of(self, call: str, arguments: str, result: int, opened: str) -> Iterator[Event]:
        fd = _FD.match(arguments)
        path = _plain(fd[1]) if fd is not None else ""
        if call == "write" and arguments.startswith("1<"):
            yield Mark(_bytes(arguments).decode())
        elif call == "mkdir":
            yield from self._named(_bytes(arguments).decode(), is_folder=True)
        elif call == "rename":
            yield from self._renamed(*(_raw(text).decode() for text in _TEXT.findall(arguments)))
        elif call == "openat":
            opened = _plain(opened)
            if "O_DSYNC" in arguments:
                self._dsync.add(result)
            else:
                self._dsync.discard(result)
            if "O_CREAT" in arguments:
                yield from self._named(opened, is_folder=False)
        elif path.startswith(self._root) and not path.endswith("lock.mdb"):
            yield from self._changed(call, arguments, path)

    def _changed(self, call: str, arguments: str, path: str) -> Iterator[Event]:
        node = self._nodes[path[len(self._root) :].strip("/")]
        if call == "lseek" and "SEEK_SET" in arguments:
            self._at[path] = int(arguments.split(",")[1])
        elif call in ("pwrite64", "pwritev", "write", "writev"):
            payload = b"".join(_raw(text) for text in _TEXT.findall(arguments))
            positioned = call.startswith("p")
            offset = int(arguments.rsplit(",", 1)[1]) if positioned else self._at.get(path, 0)
            yield Write(node, offset, payload)
            if not positioned:
                self._at[path] = offset + len(payload)
            if int(arguments.split("<", 1)[0]) in self._dsync:
                yield Synced(node)
        elif call == "ftruncate":
            yield Resize(node, int(arguments.split(",")[1]))
        elif call in ("fdatasync", "fsync"):
            yield FolderSynced(node) if os.path.isdir(path) else Synced(node)

    def _renamed(self, source: str, target: str) -> Iterator[Event]:
        old, new = (path[len(self._root) :].strip("/") for path in (source, target))
        node = self._nodes[new] = self._nodes.pop(old)
        places = []
        for path, leads_to in ((old, None), (new, node)):
            folder, _, name = path.rpartition("/")
            places.append(Place(self._nodes[folder], name, leads_to))
        yield Names(tuple(places))

    def _named(self, path: str, *, is_folder: bool) -> Iterator[Event]:
        below = path[len(self._root) :].strip("/")
        if not path.startswith(self._root) or below in self._nodes or path.endswith("lock.mdb"):
            return
        self._last += 1
        self._nodes[below] = self._last
        folder, _, name = below.rpartition("/")
        yield Names((Place(self._nodes[folder], name, self._nodes[below], is_folder),))


def _raw(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def _bytes(arguments: str) -> bytes:
    found = _TEXT.search(arguments)
    return _raw(found[1]) if found is not None else b""


def _plain(path: str) -> str:
    return _raw(path).decode() if path.startswith("\\x") else path


@dataclass(slots=True)
class Cuts:
    """Cuts the log of one run and checks what is opened."""

    seed: str
    count: int
    points: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    _known: set[bytes] = field(default_factory=set)

    def run(self, events: list[Event], folder: str) -> None:
        """Every place, every kind."""
        states = self._states()
        model, begun, done, synced, is_made = DiskModel(), 0, 0, 0, False
        for place, event in enumerate(events, 1):
            model.take(event)
            if isinstance(event, Mark):
                word, _, number = event.name.partition(" ")
                begun = int(number) if word == "begun" else begun
                done = int(number) if word == "done" else done
                synced = int(number) if word == "synced" else synced
                is_made = True
            if not is_made:
                continue  # the store has never been used: nothing was answered
            for kind in KINDS:
                chance = chance_of(self.seed, place, kind)
                cut = model.killed() if kind == "kill" else model.power_cut(_KIND.get(kind, kind), chance)
                least = done if kind == "kill" else synced
                key = cut.digest() + bytes((least, begun)) if cut is not None else b""
                if cut is None or key in self._known:
                    continue
                self._known.add(key)
                self.points[kind] += 1
                materialise(cut, f"{folder}/store")
                try:
                    problem = _problem(f"{folder}/store", states[least : begun + 1])
                finally:
                    shutil.rmtree(f"{folder}/store")
                if problem:
                    self.findings.append(f"{self.seed}:{place}:{kind}: {problem}")

    def _states(self) -> list[Rows]:
        rows: Rows = {}
        states = [dict(rows)]
        for change in changes(self.seed, self.count):
            for table, key, value in change.operations:
                if value is None:
                    rows.pop((table, key), None)
                else:
                    rows[table, key] = value
            states.append(dict(rows))
        return states


def _problem(root: str, possible: list[Rows]) -> str:
    try:
        index = Index(SmallDisk(root))
    except Exception as e:
        return f"it does not open: {e!r}"
    try:
        tables = (Table.CHUNK, Table.INODE, Table.ENTRY)
        found = {(table, bytes(key)): bytes(value) for table in tables for key, value in index.scan(table)}
        return "" if found in possible else "it is no state that was, or one that is too old or too new"
    finally:
        index.close()


def cut_lmdb(seed: str, count: int) -> Cuts:
    """Record a run and cut it."""
    folder = memory_folder("ckptfs-lmdb-")
    try:
        os.mkdir(f"{folder}/recorded")
        traced(f"{folder}/recorded", seed, count, f"{folder}/trace")
        with open(f"{folder}/trace", encoding="ascii") as lines:
            events = list(Trace(f"{folder}/recorded").events(lines))
        cuts = Cuts(seed, count)
        cuts.run(events, folder)
        return cuts
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", default=None)
    parser.add_argument("--changes", type=int, default=60)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--record", default=None, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.record is not None:
        make(asked.record, asked.seed, asked.changes)
        return 0
    seed = asked.seed if asked.seed is not None else str(random.SystemRandom().randrange(2**32))
    print(f"seed {seed}", flush=True)
    if shutil.which("strace") is None:
        print("lmdbcuts: strace is not there; install it (Debian: apt-get install strace)", file=sys.stderr)
        return 2
    begun = time.monotonic()
    cuts = cut_lmdb(seed, asked.changes)
    for finding in cuts.findings:
        print(f"      ! {finding}")
    facts = {
        "seed": seed,
        "distinct_points": sum(cuts.points.values()),
        "by_kind": dict(cuts.points),
        "findings": len(cuts.findings),
        "seconds": round(time.monotonic() - begun, 1),
    }
    print(json.dumps(facts, indent=2))
    if asked.json is not None:
        asked.json.write_text(json.dumps({**facts, "found": cuts.findings}, indent=1))
    return 1 if cuts.findings else 0


if __name__ == "__main__":
    sys.exit(main())
