"""Three nodes copy one run to a remote, fetch from it and collect it, while the network fails and nodes die.

    python tests/remoteruns.py [--runs 1000] [--seed N]

The one rule: what the remote holds is judged by a walk over its bare objects, which knows nothing of push,
pull and collector, after every round: each version that the newest head of a unit lists has every chunk in a
pack that counts, no head has ever listed less than the one before it (but for what a collector was allowed to
let go), and at the end a fresh node fetches every version as it was saved, and what nothing needs is gone.

Prints the seed of a run that fails; the same seed makes the same run, as far as threads allow.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import trio
from faultbucket import FaultBucket, Faults, Killed, MemoryBucket
from saved_store import SavedStore, Tree, contents

from ckptfs.store.errors import CkptfsError
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import ChunkId, UnitId
from ckptfs.store.recipe import decode_recipe
from ckptfs.store.remote import log, sending
from ckptfs.store.remote.box import RemoteKey
from ckptfs.store.remote.catalogue import RemoteUnit, read_unit
from ckptfs.store.remote.collecting import Collector
from ckptfs.store.remote.copied import CopiedUnits
from ckptfs.store.remote.head import RemoteHead, decode_head
from ckptfs.store.remote.heads import newest_heads
from ckptfs.store.remote.kept import EVERYTHING, Kept, decode_kept
from ckptfs.store.remote.log_entry import Claim, Decision, Entry, decode_entry
from ckptfs.store.remote.names import parse_head_key
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.pack import pack_chunks
from ckptfs.store.remote.pull import Puller
from ckptfs.store.remote.push import Pusher
from ckptfs.store.remote.retrying import RetryingBucket
from ckptfs.store.remote.shard import decode_shard
from ckptfs.store.signing import SigningKey
from ckptfs.store.tree import decode_tree

NODES = 3
ROUNDS = 9
_MOST_CALLS = 150
# Of packs that hold the same in part, one after the other turns out not to be needed.
_MOST_COLLECTIONS = 6
_PAUSES_S = (0.0, 0.0, 0.0)
_KEY = SigningKey(b"k" * 32)
_PACK_BYTES, _PACKS_A_SHARD = 60_000, 2


@dataclass(slots=True)
class Outcome:
    """What happened in a run: how often something was pushed, pulled, refused, killed; which faults came."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: set[str] = field(default_factory=set)


class Node:
    """A store and what it saved. A death loses whatever push and pull had in memory."""

    def __init__(self, number: int, path: Path, run: Run) -> None:
        self.number = number
        self.store = SavedStore(path, key=_KEY, node=b"%d" % number)
        self._run = run
        self._random = random.Random(run.seed * 1000 + number)

    async def act(self) -> None:
        """Save, copy or fetch something, with faults; it may fail in no other way than promised."""
        action = self._random.choice(["save", "pull", *["push"] * 3, *["collect"] * 3])
        if action == "save" or not self.store.histories.versions(self.store.unit(b"run").unit):
            await self.save()
            return
        faults = self._faults()
        remote = self._run.remote(faults)
        try:
            await {"push": self.push, "pull": self.pull, "collect": self.collect}[action](remote)
            self._run.outcome.counts[action] += 1
        except BaseExceptionGroup as e:
            if e.split((Killed, trio.Cancelled))[1] is not None:
                raise
            self._run.outcome.counts["killed"] += 1
        except Killed:
            self._run.outcome.counts["killed"] += 1
        except CkptfsError as e:
            self._run.outcome.counts[type(e).__name__] += 1
        self._run.outcome.faults |= faults.seen

    def _faults(self) -> Faults:
        rng = self._random
        kind = rng.choice(["none", "network", "lists", "torn", "all"])
        chance = rng.choice([0.02, 0.1])
        network = chance if kind in ("network", "all") else 0.0
        return Faults(
            rng.getrandbits(32),
            refused=network,
            lost=network,
            in_flight=network,
            stale=3 * chance if kind in ("lists", "all") else 0.0,
            torn=chance if kind in ("torn", "all") else 0.0,
            die_at=rng.randrange(_MOST_CALLS) if rng.random() < 0.5 else None,
        )

    async def save(self) -> VersionRecord:
        rng = self._random
        tree: Tree = {
            b"shared": random.Random(rng.randrange(3)).randbytes(100_000),
            b"own": rng.randbytes(rng.randrange(50_000)),
            b"sub": {b"number": b"%d" % rng.getrandbits(60)},
        }
        record = await self.store.publish(b"run", tree)
        self._run.saved[record.unit, record.number] = contents(tree)
        return record

    async def push(self, remote: Remote) -> None:
        store = self.store
        copied = CopiedUnits(store.index, "backup")
        unit = store.unit(b"run").unit
        await Pusher(remote, store.disk, store.segments, store.histories, copied, "node").push(unit)
        noted = copied.of(unit)
        assert noted is not None
        _, head = self._run.heads()[unit]
        assert noted.sequence <= head.sequence
        let_go = {number for one, number in self._run.may_go if one == unit}
        assert {*noted.versions} - {*head.versions} <= let_go, "a collector may have let some go since"

    async def pull(self, remote: Remote) -> None:
        await remote.open()
        found = [one.head for one in await newest_heads(remote) if one.head is not None and one.head.versions]
        if found:
            unit = await read_unit(remote, self._random.choice(found))
            await fetch(self.store, remote, self._random.choice(unit.versions), b"copy", self._run)

    async def collect(self, remote: Remote) -> None:
        kept = self._random.choice([1, 1, 2, 99])

        def let_go(unit: RemoteUnit, now_ns: int) -> set[int]:
            going = {record.number for record in unit.versions[:-kept]}
            self._run.may_go |= {(unit.head.unit, number) for number in going}
            return going

        grace_s = self._random.choice([0.0, 0.0, 0.0, 100.0, 1e9])
        dry_run = self._random.random() < 0.1
        found = await Collector(remote, "node", self._random.randbytes, let_go, grace_s).collect(
            dry_run=dry_run
        )
        if found.is_off:
            self._run.outcome.counts["called off"] += 1
        elif not dry_run:
            self._run.outcome.counts["packs removed"] += found.removed_packs
            self._run.outcome.counts["copied over"] += found.copied_bytes > 0


async def fetch(store: SavedStore, remote: Remote, version: VersionRecord, name: bytes, run: Run) -> None:
    """Pull a version and compare it with what was saved."""
    puller = Puller(remote, store.index, store.segments, store.ingest, store.histories, os.urandom)
    pulled = await puller.pull(version, name)
    assert store.read_version(pulled.record) == run.saved[version.unit, version.number]


class Run:
    """One run: the storage, the nodes, and what must be true of them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.bucket = MemoryBucket()
        self.key = RemoteKey(b"s" * 32) if seed % 2 else None
        self.saved: dict[tuple[UnitId, int], dict[bytes, bytes]] = {}
        self.outcome = Outcome()
        self.may_go: set[tuple[UnitId, int]] = set()
        self.history_may_shrink = False
        self._seen: dict[UnitId, RemoteHead] = {}

    def remote(self, faults: Faults | None = None) -> Remote:
        bucket = FaultBucket(self.bucket, faults if faults is not None else Faults(0))
        return Remote(RetryingBucket(bucket, _PAUSES_S), self.key)

    def _content(self, key: str) -> bytes:
        payload = self.bucket.objects[key].payload
        return payload if self.key is None else self.key.disclose(key, payload)

    def heads(self) -> dict[UnitId, tuple[int, RemoteHead]]:
        """Of each unit the highest number, and the newest head that is whole."""
        found: dict[UnitId, tuple[int, RemoteHead]] = {}
        for key in self.bucket.keys("heads"):
            parsed = parse_head_key(key)
            assert parsed is not None, key
            try:
                found[parsed[0]] = parsed[1], decode_head(self._content(key))
            except CkptfsError:
                continue  # torn: nobody was told of it
        return found

    def _entry(self, number: int) -> Entry | None:
        for key in (f"log/{number:016x}", f"log/{number:016x}.copy"):
            try:
                return decode_entry(self._content(key), number)
            except (CkptfsError, KeyError):
                continue
        return None

    def _kept(self) -> Kept:
        """What counts, by the log from its first entry."""
        claim, name, waiting, number = 0, b"", 0, 1
        while f"log/{number:016x}" in self.bucket.objects:
            entry = self._entry(number)
            if isinstance(entry, Claim):
                assert not waiting, "a claim before the one before it was decided"
                waiting = number
            elif isinstance(entry, Decision) and entry.claim == waiting:
                waiting = 0
                if entry.kept:
                    claim, name = entry.claim, entry.kept
            number += 1
        if not claim:
            return EVERYTHING
        found = decode_kept(self._content(f"kept/{name.hex()}"))
        assert found.claim == claim
        return found

    def _chunks(self) -> dict[ChunkId, bytes]:
        """Every chunk of a pack that counts."""
        found: dict[ChunkId, bytes] = {}
        kept = self._kept()
        for key in self.bucket.keys("shards"):
            try:
                shard = decode_shard(self._content(key))
            except CkptfsError:
                continue
            for pack in shard.packs:
                name = pack.name.hex()
                if kept.counts(bytes.fromhex(key.rpartition("/")[2]), pack):
                    found.update(pack_chunks(self._content(f"packs/{name[:2]}/{name}")))
        return found

    async def judge(self) -> None:
        """Nothing went back, nothing that is listed lacks anything."""
        chunks = self._chunks()
        for unit, (_, head) in self.heads().items():
            before = self._seen.get(unit)
            if before is not None:
                assert head.sequence >= before.sequence, "a head went back"
                lost = {(unit, number) for number in {*before.versions} - {*head.versions}}
                assert lost <= self.may_go, "a version was lost"
                is_back = head.history_bytes < before.history_bytes
                assert self.history_may_shrink or not is_back, "a history went back"
            self._seen[unit] = head
            for version in (await read_unit(self.remote(), head)).versions:
                files = dict(_files(chunks, version.top.tree or b"", b""))
                assert files == self.saved[unit, version.number], "a version is not what was saved"
            assert len((await read_unit(self.remote(), head)).versions) == len(head.versions)

    async def collect_cleanly(self) -> None:
        """Nobody is at work: then what nothing needs goes, and nothing else."""
        for _ in range(_MOST_COLLECTIONS):
            collected = await self._collector().collect()
            assert not collected.is_off and collected.went == []
            shards = {key: decode_shard(self._content(key)) for key in self.bucket.keys("shards")}
            listed = {pack.name.hex() for shard in shards.values() for pack in shard.packs}
            packs = {key.rpartition("/")[2] for key in self.bucket.keys("packs")}
            assert packs <= listed and len(packs) == collected.kept_packs
            assert {bytes.fromhex(key.rpartition("/")[2]) for key in shards} == self._kept().shards
            assert len(self.bucket.keys("kept")) == 2
            again = await self._collector().collect(dry_run=True)
            if (again.removed_packs, again.removed_shards, again.copied_bytes) == (0, 0, 0):
                return
        raise AssertionError(f"there is always something to collect: {again}")

    def _collector(self) -> Collector:
        return Collector(self.remote(), "node", os.urandom, lambda unit, now_ns: (), 0.0)


def _files(chunks: dict[ChunkId, bytes], tree: bytes, path: bytes) -> Iterator[tuple[bytes, bytes]]:
    for entry in decode_tree(chunks[ChunkId(tree)]):
        below = os.path.join(path, entry.name)
        if entry.tree is not None:
            yield from _files(chunks, entry.tree, below)
        elif entry.recipe is not None:
            recipe = decode_recipe(chunks[entry.recipe])
            pieces = recipe.pieces()
            yield (
                below,
                b"".join(chunks[p.chunk] if p.chunk is not None else bytes(p.length) for p in pieces),
            )


@contextmanager
def small_packs(wait_s: float) -> Iterator[None]:
    before = sending.PACK_BYTES, sending.PACKS_A_SHARD, log.WAIT_S, log.POLL_S
    sending.PACK_BYTES, sending.PACKS_A_SHARD = _PACK_BYTES, _PACKS_A_SHARD
    log.WAIT_S, log.POLL_S = wait_s, 0.001
    try:
        yield
    finally:
        sending.PACK_BYTES, sending.PACKS_A_SHARD, log.WAIT_S, log.POLL_S = before


async def run_once(seed: int, folder: Path) -> Outcome:
    """One run in an empty folder; AssertionError says what was lost."""
    run = Run(seed)
    nodes = [Node(number, folder / str(number), run) for number in range(NODES)]
    try:
        # How long a collector is waited for decides nothing but who gives way to whom.
        with small_packs(0.0 if seed % 3 == 0 else 0.05):
            for _ in range(ROUNDS):
                async with trio.open_nursery() as nursery:
                    for node in nodes:
                        nursery.start_soon(node.act)
                await run.judge()
            for node in nodes:
                await node.save()
                await node.push(run.remote())
            await run.judge()
            await run.collect_cleanly()
            await run.judge()
            await _fetch_everything(run, folder / "fresh")
    finally:
        for node in nodes:
            node.store.close()
    return run.outcome


async def _fetch_everything(run: Run, path: Path) -> None:
    store = SavedStore(path, key=SigningKey(b"f" * 32))
    try:
        remote, listed = run.remote(), set[tuple[UnitId, int]]()
        for number, newest in enumerate(await newest_heads(remote)):
            assert newest.head is not None
            unit = await read_unit(remote, newest.head)
            assert unit.check([_KEY.public]).findings == []
            for version in unit.versions:
                await fetch(store, remote, version, b"copy-%d" % number, run)
                listed.add((version.unit, version.number))
        gone = {key for key in run.saved if key not in listed}
        assert gone <= run.may_go, "a version was not copied"
    finally:
        store.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="runs of push and pull with faults")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None)
    asked = parser.parse_args()
    first = asked.seed if asked.seed is not None else random.SystemRandom().randrange(1 << 30)
    total = Outcome()
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    for seed in range(first, first + asked.runs):
        with tempfile.TemporaryDirectory(prefix="ckptfs-remote-runs-", dir=shared) as folder:
            try:
                outcome = trio.run(run_once, seed, Path(folder))
            except BaseException:
                print(f"seed {seed} failed; again: --runs 1 --seed {seed}", flush=True)
                raise
        total.counts += outcome.counts
        total.faults |= outcome.faults
    print(f"{asked.runs} runs from seed {first}: {dict(total.counts)}, faults {sorted(total.faults)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
