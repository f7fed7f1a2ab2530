"""A store with a live tree and versions, made without a mount."""

from __future__ import annotations

import stat
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import trio

from ckptfs.daemon.addresses import Addresses
from ckptfs.daemon.file_queries import FileQueries
from ckptfs.daemon.messages import Json, unreported
from ckptfs.daemon.proving import Prover
from ckptfs.daemon.queries import Facts, Queries
from ckptfs.daemon.verifying import worker_limiter
from ckptfs.fusefs.draft import Drafts
from ckptfs.fusefs.kept_state import KeptState
from ckptfs.fusefs.namespace import Namespace, key_of
from ckptfs.fusefs.requests import Requests
from ckptfs.fusefs.units import Units
from ckptfs.store.digest_log import DigestLog
from ckptfs.store.disk import Disk
from ckptfs.store.hashing import chunk_id
from ckptfs.store.health_log import HealthLog
from ckptfs.store.histories import Histories
from ckptfs.store.history import State, VersionRecord
from ckptfs.store.ids import ChunkId, TreeId, UnitId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.ingest import Ingest
from ckptfs.store.inode import ROOT_INO, Content, Inode, encode_inode
from ckptfs.store.keyring import Keyring
from ckptfs.store.layout import open_store
from ckptfs.store.merge_log import MergeLog
from ckptfs.store.merkle import file_root, version_root
from ckptfs.store.recipe import Piece, Recipe
from ckptfs.store.segments import Segments
from ckptfs.store.signing import SigningKey
from ckptfs.store.staging import Staging
from ckptfs.store.tree import Entry, encode_tree
from ckptfs.store.version_names import version_name
from ckptfs.store.writer_log import WriterLog

PIECE_BYTES = 1000
KEY = SigningKey(b"k" * 32)
Files = Mapping[str, bytes]


class FilledStore:
    """The parts of an open store, with the means to fill it. `modes` are those of what is made next."""

    def __init__(self, folder: Path) -> None:
        self.disk: Disk = open_store(str(folder / "store"), create=True)
        self.index = Index(self.disk)
        self.segments = Segments(self.disk, self.index)
        staging = Staging(self.disk, 1)
        self.ingest = Ingest(self.disk, self.index, self.segments, staging)
        self.histories = Histories(self.disk, self.index, key=KEY)
        self.namespace = Namespace(self.index, self.disk)
        change = Change()
        root = Inode(stat.S_IFDIR | 0o755, 0, 0, ((ROOT_INO, b""),), 0, 0, 0)
        change.put(Table.INODE, key_of(ROOT_INO), encode_inode(root))
        self.index.apply(change)
        self.drafts = Drafts(self.namespace, staging, Requests(KeptState.make()), lambda: 7)
        self.units = Units(self.namespace, ())
        self.addresses = Addresses(self.namespace, self.histories, self.units.top_of)
        self.keyring = keyring = Keyring(KEY)
        self.queries = Queries(
            self.disk,
            self.namespace,
            self.segments,
            self.histories,
            self.addresses,
            self.units.is_top,
            self._facts,
            keyring,
            WriterLog(self.disk, self.index, self.histories),
            MergeLog(self.disk, self.index, self.histories),
            HealthLog(self.disk, self.index, self.histories),
        )
        self.prover = Prover(self.segments, self.histories, self.addresses, keyring)
        self.digests = DigestLog(self.disk, self.index, self.histories)
        health = HealthLog(self.disk, self.index, self.histories)
        limiter = worker_limiter()
        self.files = FileQueries(
            self.disk, self.segments, self.addresses, self.histories, self.digests, health, keyring, limiter
        )
        self._objects: list[tuple[ChunkId, bytes]] = []
        self._clock_s = 1_796_000_000

    async def _facts(self) -> Facts:
        return Facts(write_path="plain", why="a test", mountpoint="/mnt", ingest_pending_bytes=0)

    def close(self) -> None:
        """Commit and close."""
        self.segments.close()
        self.index.close()

    def make(self, path: str, *, mode: int, uid: int = 0, content: bytes | None = None) -> int:
        """A directory, or a file with stored content, at `path`; its inode."""
        folder, _, name = path.rpartition("/")
        parent = self.namespace.at_path(folder.encode())
        assert parent is not None
        kind = stat.S_IFDIR if content is None else stat.S_IFREG
        inode = Inode(kind | mode, uid, uid, (), 1, 1, 1)
        if content is not None:
            recipe = self.stored(content)
            held = Content(base=recipe.identity())
            inode = Inode(kind | mode, uid, uid, (), 1, 1, 1, size=len(content), content=held)
        draft = self.drafts.begin()
        ino = draft.new_inode(inode)
        draft.add_entry(parent, name.encode(), ino)
        draft.commit()
        self._flush()
        return ino

    def stored(self, content: bytes) -> Recipe:
        """The recipe of a content whose chunks will be stored."""
        parts = [content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES)]
        recipe = Recipe(Piece(len(part), self._object(part)) for part in parts)
        self._object(recipe.encode())
        return recipe

    def publish(
        self,
        name: str,
        files: Files,
        *,
        uid: int = 0,
        mode: int = 0o755,
        state: State = State.COMPLETE,
        closed: Container[str] = (),
    ) -> VersionRecord:
        """A version of the unit `name`, with these files; the unit is made if it is not there. What is
        called as one of `closed` is its owner's alone."""
        unit = self.histories.unit_named(name.encode())
        if unit is None:
            ino = self.namespace.at_path(b"/" + name.encode()) or 0
            number = len(self.histories.units()) + 1
            unit = self.histories.new_unit(UnitId(number.to_bytes(16, "big")), name.encode(), ino, 1)
        top = Entry(
            name=b"top",
            mode=stat.S_IFDIR | mode,
            uid=uid,
            gid=uid,
            mtime_ns=1,
            ctime_ns=1,
            tree=self._tree(files, uid, mode, closed),
        )
        root = version_root((path.encode(), _root(self.stored(one))) for path, one in files.items())
        self._flush()
        self._clock_s += 60
        record = VersionRecord(
            unit=unit.unit,
            number=unit.next_number,
            name=version_name(unit.next_number, self._clock_s * 10**9),
            time_ns=self._clock_s * 10**9,
            origin="command",
            top=top,
            root=root,
            files=len(files),
            logical_bytes=sum(map(len, files.values())),
            state=state,
            step=None,
            steps=(),
            missing=(),
            before=unit.head,
        )
        change = Change()
        self.histories.append_version(record, change)
        self.index.apply(change, sync=True)
        return record

    def verify(self, text: str) -> dict[str, Json]:
        """`ckptfs verify`."""
        return answered(trio.run(self.queries.verify, self.addresses.find(text), unreported))

    def prove(
        self, text: str, keys: Sequence[str] = (), expect: str | None = None
    ) -> tuple[dict[str, Json], list[object]]:
        """`ckptfs log --verify`: the answer, and what kinds of findings are in it."""
        answer = answered(trio.run(self.queries.prove, self.addresses.find(text), keys, expect))
        findings = answer["findings"]
        assert isinstance(findings, list)
        return answer, [answered(finding)["fault"] for finding in findings]

    def proof(self, text: str, tensor: str | None = None) -> dict[str, Json]:
        """`ckptfs prove`."""
        return answered(trio.run(self.prover.proof, self.addresses.find(text), tensor, lambda entry: True))

    def usage(self, text: str) -> dict[str, Json]:
        """`ckptfs du`."""
        return answered(trio.run(self.queries.usage, self.addresses.find(text)))

    def _tree(self, files: Files, uid: int, mode: int, closed: Container[str]) -> TreeId:
        entries = []
        folders: dict[str, dict[str, bytes]] = {}
        for path, content in files.items():
            first, slash, rest = path.partition("/")
            if slash:
                folders.setdefault(first, {})[rest] = content
                continue
            recipe = self.stored(content)
            kind = stat.S_IFREG | mode & (0o600 if first in closed else 0o666)
            entries.append(_entry(first, kind, uid, len(content), recipe))
        for name, below in folders.items():
            tree = self._tree(below, uid, mode, closed)
            kind = stat.S_IFDIR | mode & (0o700 if name in closed else 0o777)
            entries.append(_entry(name, kind, uid, 0, None, tree))
        return TreeId(self._object(encode_tree(entries)))  # type: ignore[arg-type]

    def _object(self, payload: bytes) -> ChunkId:
        identity = chunk_id(payload)
        self._objects.append((identity, payload))
        return identity

    def _flush(self) -> None:
        objects, self._objects = self._objects, []
        trio.run(self.ingest.store_objects, objects)


def answered(answer: Json) -> dict[str, Json]:
    """An answer that is an object."""
    assert isinstance(answer, dict)
    return answer


def _entry(
    name: str, mode: int, uid: int, size: int, recipe: Recipe | None, tree: TreeId | None = None
) -> Entry:
    return Entry(
        name=name.encode(),
        mode=mode,
        uid=uid,
        gid=uid,
        mtime_ns=1,
        ctime_ns=1,
        size=size,
        recipe=recipe.identity() if recipe is not None else None,
        root=_root(recipe) if recipe is not None else None,
        tree=tree,
    )


def _root(recipe: Recipe) -> bytes:
    return file_root(recipe.root_leaves())
