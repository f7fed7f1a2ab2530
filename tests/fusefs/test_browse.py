"""`.versions`: what it lists, what it shows of it, to whom, and what it costs in memory.

The one rule: browse is asked as the kernel asks, by inode number and name; the live tree, the histories
and the trees below are dicts.
"""

from __future__ import annotations

import errno
import hashlib
import stat
import sys
from dataclasses import replace
from typing import Any

import pytest

from ckptfs.fusefs.attributes import Attributes
from ckptfs.fusefs.browse import Browse
from ckptfs.fusefs.browse_nodes import NodeTable
from ckptfs.fusefs.browse_rights import mode_behind, mode_today
from ckptfs.fusefs.errnos import PosixError
from ckptfs.fusefs.kept_state import KeptState
from ckptfs.fusefs.node_ids import FIRST_VIRTUAL_INO
from ckptfs.fusefs.requests import Requests
from ckptfs.store.errors import Corrupt, NotFound
from ckptfs.store.history import GENESIS, State, VersionRecord
from ckptfs.store.ids import ChunkId, CidCodec, RecipeId, TreeId, UnitId, cid_text
from ckptfs.store.inode import ROOT_INO, Inode
from ckptfs.store.tree import Entry, encode_tree
from ckptfs.store.units import Unit, shown_names
from ckptfs.store.version_names import version_name

A, B, C = (UnitId(bytes([n]) * 16) for n in (0xA1, 0xB2, 0xC3))
START_NS = 1_796_000_000_000_000_000
DIR, FILE, SYMLINK = stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK


def digest(content: bytes) -> ChunkId:
    return ChunkId(hashlib.sha3_256(content).digest())


def entry(name: bytes, mode: int, uid: int = 1000, gid: int = 1000, **fields: Any) -> Entry:
    base = Entry(name=name, mode=mode, uid=uid, gid=gid, mtime_ns=START_NS + 7, ctime_ns=START_NS + 9)
    return replace(base, **fields)


def file(name: bytes, size: int = 5, **fields: Any) -> Entry:
    mode = fields.pop("mode", 0o640)
    assert isinstance(mode, int)
    recipe, root = RecipeId(digest(b"r" + name)), digest(b"m" + name)
    return entry(name, FILE | mode, size=size, recipe=recipe, root=root, **fields)


class Trees:
    """Saved directories by id; `damaged` ones cannot be read. Counts what is read."""

    def __init__(self) -> None:
        self.trees: dict[TreeId, tuple[Entry, ...]] = {}
        self.damaged: set[TreeId] = set()
        self.reads = 0

    def read_tree(self, identity: TreeId) -> tuple[Entry, ...]:
        self.reads += 1
        if identity in self.damaged:
            raise Corrupt("a tree is damaged")
        return self.trees[identity]

    def dir(self, name: bytes, *entries: Entry, mode: int = 0o755, **fields: Any) -> Entry:
        rows = tuple(sorted(entries, key=lambda e: e.name))
        tree = TreeId(digest(encode_tree(rows)))
        self.trees[tree] = rows
        return entry(name, DIR | mode, tree=tree, **fields)


class Histories:
    """What Histories answers, out of dicts."""

    def __init__(self) -> None:
        self.rows: dict[UnitId, Unit] = {}
        self.records: dict[UnitId, dict[int, VersionRecord]] = {}
        self.tagged: dict[UnitId, dict[str, int]] = {}

    def make(self, unit: UnitId, name: bytes, ino: int) -> None:
        self.rows[unit] = Unit(unit, name, ino, 1, GENESIS, 1, START_NS, 0, name, len(self.rows), 0)
        self.records[unit] = {}
        self.tagged[unit] = {}

    def change(self, unit_id: UnitId, **fields: Any) -> None:
        unit = self.rows[unit_id]
        values = {name: getattr(unit, name) for name in unit.__struct_fields__} | fields
        values["frames"] = unit.frames + 1
        self.rows[unit_id] = Unit(**values)

    def publish(
        self, unit_id: UnitId, top: Entry, state: State = State.COMPLETE, steps: tuple[int, ...] = ()
    ) -> VersionRecord:
        number = self.rows[unit_id].next_number
        time_ns = START_NS + number * 10**9
        record = VersionRecord(
            unit=unit_id,
            number=number,
            name=version_name(number, time_ns),
            time_ns=time_ns,
            origin="settled",
            top=replace(top, name=b"top"),
            root=digest(b"root"),
            files=1,
            logical_bytes=1,
            state=state,
            step=steps[-1] if steps else None,
            steps=steps,
            missing=(),
            before=GENESIS,
        )
        self.records[unit_id][number] = record
        self.change(unit_id, next_number=number + 1, newest_ns=time_ns)
        return record

    def tag(self, unit_id: UnitId, number: int, name: str) -> None:
        self.tagged[unit_id][name] = number
        self.change(unit_id)

    def forget(self, unit_id: UnitId, number: int) -> None:
        del self.records[unit_id][number]
        self.change(unit_id)

    def unit(self, unit_id: UnitId) -> Unit | None:
        return self.rows.get(unit_id)

    def unit_of_ino(self, ino: int) -> Unit | None:
        return next((u for u in self.rows.values() if u.ino == ino), None)

    def unit_named(self, name: bytes) -> Unit | None:
        return max((u for u in self.rows.values() if u.name == name), key=lambda u: u.claim, default=None)

    def shown_names(self) -> dict[bytes, Unit]:
        return shown_names(u for u in self.rows.values() if u.ino or self.records[u.unit])

    def has_version(self, unit_id: UnitId, number: int) -> bool:
        return number in self.records[unit_id]

    def version(self, unit_id: UnitId, number: int) -> VersionRecord | None:
        return self.records[unit_id].get(number)

    def versions(self, unit_id: UnitId) -> list[VersionRecord]:
        return list(self.records[unit_id].values())

    def newest(self, unit_id: UnitId) -> VersionRecord | None:
        return next(reversed(self.versions(unit_id)), None)

    def newest_complete(self, unit_id: UnitId) -> VersionRecord | None:
        found = [r for r in self.versions(unit_id) if r.state is State.COMPLETE]
        return found[-1] if found else None

    def tags(self, unit_id: UnitId) -> dict[str, int]:
        return self.tagged[unit_id]


class Live:
    """The live tree (Namespace) and its units (Units): top-level directories and `deep` ones."""

    def __init__(self) -> None:
        self.inodes: dict[int, Inode] = {}
        self.deep: set[int] = set()
        self.root_is_run = False
        self.make(ROOT_INO, ROOT_INO, b"", 0o755, 0, 0)

    def make(
        self, ino: int, parent: int, name: bytes, mode: int = 0o755, uid: int = 1000, gid: int = 1000
    ) -> None:
        self.inodes[ino] = Inode(DIR | mode, uid, gid, ((parent, name),), START_NS, START_NS, START_NS)

    def remove(self, ino: int) -> None:
        del self.inodes[ino]

    def find(self, ino: int) -> Inode | None:
        return self.inodes.get(ino)

    def inode(self, ino: int) -> Inode:
        if ino not in self.inodes:
            raise PosixError(errno.ENOENT)
        return self.inodes[ino]

    def attributes(self, ino: int) -> Attributes:
        i = self.inode(ino)
        return Attributes(ino, i.mode, 2, i.uid, i.gid, 0, 0, 0, i.atime_ns, i.mtime_ns, i.ctime_ns)

    def ancestors(self, directory: int) -> list[int]:
        chain = [directory]
        while chain[-1] != ROOT_INO:
            chain.append(self.inode(chain[-1]).links[0][0])
        return chain

    def at_path(self, path: bytes) -> int | None:
        return next((ino for ino in self.inodes if self.path_of(ino) == path), None)

    def path_of(self, ino: int) -> bytes:
        return b"/" + b"/".join(self.inode(i).links[0][1] for i in self.ancestors(ino)[-2::-1])

    def top_of(self, directory: int) -> int:
        chain = self.ancestors(directory)
        deep = [ino for ino in chain if ino in self.deep]
        return ROOT_INO if self.root_is_run else (deep or chain[-2:])[0]

    def path_in_unit(self, top: int, directory: int) -> list[tuple[int, bytes]]:
        chain = self.ancestors(directory)
        return [(ino, self.inode(ino).links[0][1]) for ino in chain[: chain.index(top)][::-1]]

    def takes_subdirectories(self, top: int) -> bool:
        return top != ROOT_INO or self.root_is_run


class World:
    """Everything below a Browse, which is asked by paths the way the kernel walks them."""

    def __init__(self) -> None:
        self.trees = Trees()
        self.histories = Histories()
        self.live = Live()
        self.restart()

    def restart(self) -> None:
        state = KeptState.make()
        nodes = NodeTable(state, Requests(state))
        self.browse = Browse(self.trees, self.histories, self.live, self.live, nodes)

    def at(self, live: int, path: bytes = b"") -> Attributes:
        attributes = self.browse.versions_dir(live)
        for name in path.split(b"/") if path else ():
            self.browse.remember(attributes.ino)
            attributes = self.browse.lookup(attributes.ino, name)
        self.browse.remember(attributes.ino)
        return attributes

    def names(self, ino: int, page: int = 100) -> list[bytes]:
        names: list[bytes] = []
        after = 0
        while rows := self.browse.entries(ino, after, page):
            for cookie, name, attributes in rows:
                assert cookie > after
                after = cookie
                assert self.browse.lookup(ino, name) == attributes, name
                names.append(name)
        return names


@pytest.fixture
def world() -> World:
    """run1 (inode 10) with sub (11): v1 without sub, v2 with it, v3 partial."""
    world = World()
    trees, histories = world.trees, world.histories
    world.live.make(10, ROOT_INO, b"run1", 0o750, uid=1000, gid=50)
    world.live.make(11, 10, b"sub", 0o711)
    histories.make(A, b"run1", 10)
    config = file(b"config.json", 1000, xattrs=((b"user.note", b"hello"),))
    histories.publish(A, trees.dir(b"top", config, gid=50), steps=(100,))
    sub = trees.dir(b"sub", file(b"model.pt", 5000), trees.dir(b"deep"), mode=0o700, uid=7)
    link = entry(b"link", SYMLINK | 0o777, target=b"config.json")
    fifo = entry(b"fifo", stat.S_IFIFO | 0o600)
    device = entry(b"device", stat.S_IFCHR | 0o600, rdev=0x103)
    top = trees.dir(b"top", config, sub, link, fifo, device, gid=50, mode=0o2751)
    histories.publish(A, top, steps=(100, 200))
    histories.publish(A, top, State.PARTIAL, steps=(100, 200))
    histories.tag(A, 1, "best")
    return world


def test_a_directory_lists_versions_and_links(world: World) -> None:
    v1, v2, v3 = (r.name.encode() for r in world.histories.versions(A))
    top = world.at(10)
    names = world.names(top.ino)
    assert names[:3] == [v1, v2, v3]
    assert {n: world.browse.readlink(world.at(10, n).ino) for n in names[3:]} == {
        b"latest": v3,
        b"latest-complete": v2,
        b"best": v1,
        b"step-100": v2,
        b"step-200": v2,
    }
    for page in (1, 2, 5):
        assert world.names(top.ino, page) == names
    assert (top.mode, top.uid, top.gid) == (DIR | 0o750, 1000, 50)
    assert top.mtime_ns == world.histories.versions(A)[-1].time_ns


def test_a_subdirectory_lists_only_versions_in_which_it_was(world: World) -> None:
    _, v2, v3 = (r.name.encode() for r in world.histories.versions(A))
    top = world.at(11)
    assert top.mode == DIR | 0o711
    assert world.names(top.ino) == [v2, v3, *world.names(top.ino)[2:]]
    assert sorted(world.names(top.ino)[2:]) == [b"latest", b"latest-complete", b"step-100", b"step-200"]
    sub = world.at(11, v2)
    assert world.names(sub.ino) == [b"deep", b"model.pt"]
    for missing in (
        b"best",
        world.histories.versions(A)[0].name.encode(),
        b"v000009_20261129T160211Z",
        b"deep",
    ):
        with pytest.raises(NotFound):
            world.browse.lookup(top.ino, missing)


def test_entries_are_as_they_were_saved(world: World) -> None:
    name = world.histories.versions(A)[1].name.encode()
    version = world.at(10, name)
    assert (version.mode, version.nlink, version.gid) == (DIR | 0o2751, 3, 50)
    sub = world.at(10, name + b"/sub")
    assert (sub.mode, sub.uid, sub.nlink, sub.mtime_ns) == (DIR | 0o700, 7, 3, START_NS + 7)
    model = world.at(10, name + b"/sub/model.pt")
    assert (model.mode, model.nlink, model.size, model.blocks) == (FILE | 0o640, 1, 5000, 10)
    assert (model.mtime_ns, model.ctime_ns) == (START_NS + 7, START_NS + 9)
    link = world.at(10, name + b"/link")
    assert (link.mode, link.size, world.browse.readlink(link.ino)) == (SYMLINK | 0o777, 11, b"config.json")
    assert world.at(10, name + b"/device").rdev == 0x103
    assert stat.S_ISFIFO(world.at(10, name + b"/fifo").mode)
    assert world.browse.recipe(model.ino) == RecipeId(digest(b"rmodel.pt"))
    for not_a_directory in (model, link):
        with pytest.raises(NotFound):
            world.browse.lookup(not_a_directory.ino, b"x")
    with pytest.raises(NotFound):
        world.browse.recipe(sub.ino)
    with pytest.raises(NotFound):
        world.browse.readlink(model.ino)


def test_extended_attributes(world: World) -> None:
    record = world.histories.versions(A)[1]
    name = record.name.encode()
    config = world.at(10, name + b"/config.json")
    assert world.browse.listxattr(config.ino) == [b"user.note"]
    assert world.browse.xattrs(config.ino) == {
        b"user.note": b"hello",
        b"user.ckptfs.cid": cid_text(digest(b"rconfig.json")).encode(),
        b"user.ckptfs.root": digest(b"mconfig.json").hex().encode(),
        b"user.ckptfs.version": name,
    }
    assert record.top.tree is not None
    top = world.browse.xattrs(world.at(10, name).ino)
    assert top[b"user.ckptfs.cid"].decode() == cid_text(record.top.tree, CidCodec.DAG_CBOR)
    assert top[b"user.ckptfs.root"].decode() == record.root.hex()
    assert b"user.ckptfs.root" not in world.browse.xattrs(world.at(10, name + b"/sub").ino)
    assert world.browse.xattrs(world.at(10).ino) == {} == world.browse.xattrs(world.at(10, b"latest").ino)
    assert world.browse.xattr(config.ino, b"user.none") is None


def test_inode_numbers(world: World) -> None:
    _, v2, v3 = (r.name.encode() for r in world.histories.versions(A))
    ways = [(10, v2 + b"/sub"), (11, v2), (ROOT_INO, b"run1/" + v2 + b"/sub")]
    directories = [world.at(live, path).ino for live, path in ways]
    assert len(set(directories)) == 3
    files = {world.at(live, path + b"/model.pt").ino for live, path in ways}
    assert len(files) == 1
    assert world.at(10, v3 + b"/sub/model.pt").ino not in files
    before = [world.at(live, path) for live, path in ways]
    world.restart()
    assert [world.at(live, path) for live, path in ways] == before
    assert all(FIRST_VIRTUAL_INO <= ino < 2 * FIRST_VIRTUAL_INO for ino in (*directories, *files))


def test_hard_links_share_an_inode_and_are_counted(world: World) -> None:
    trees, histories = world.trees, world.histories
    linked = file(b"a", link=77)
    top = trees.dir(
        b"top",
        linked,
        replace(linked, name=b"b"),
        trees.dir(b"sub", replace(linked, name=b"c")),
        file(b"alone"),
    )
    record = histories.publish(A, top)
    name = record.name.encode()
    found = [world.at(10, name + path) for path in (b"/a", b"/b", b"/sub/c")]
    assert {(a.ino, a.nlink) for a in found} == {(found[0].ino, 3)}
    assert world.at(10, name + b"/alone").nlink == 1
    many = [file(b"%05d" % n) for n in range(10_001)]
    record = histories.publish(
        A, trees.dir(b"top", linked, replace(linked, name=b"b"), trees.dir(b"sub", *many))
    )
    assert world.at(10, record.name.encode() + b"/a").nlink == 2


def test_the_root_lists_every_unit_that_ever_was(world: World) -> None:
    trees, histories, live = world.trees, world.histories, world.live
    live.make(20, ROOT_INO, b"a%", 0o755)
    live.make(21, 20, b"b", 0o775, gid=60)
    live.deep.add(21)
    histories.make(B, b"a%/b", 21)
    histories.make(C, b"old", 0)
    root = world.at(ROOT_INO)
    assert sorted(world.names(root.ino)) == [b"a%25%2Fb", b"run1"]
    record = histories.publish(C, trees.dir(b"top", file(b"x"), mode=0o755, uid=99, gid=99))
    assert sorted(world.names(root.ino, 1)) == [b"a%25%2Fb", b"old", b"run1"]
    old = world.at(ROOT_INO, b"old")
    assert (old.mode, old.uid, old.gid) == (DIR | 0o700, 99, 99)
    assert world.names(old.ino)[0] == record.name.encode()
    assert world.at(ROOT_INO, b"old/latest").uid == 99
    assert world.at(ROOT_INO, b"run1").mode == world.at(10).mode
    assert sorted(world.names(world.at(ROOT_INO, b"run1").ino)) == sorted(world.names(world.at(10).ino))
    with pytest.raises(NotFound):
        world.browse.lookup(root.ino, b"a")


def test_units_of_one_name_are_told_apart(world: World) -> None:
    world.histories.make(B, b"run1", 0)
    record = world.histories.publish(B, world.trees.dir(b"top", file(b"x")))
    root = world.at(ROOT_INO)
    assert sorted(world.names(root.ino)) == [b"run1", b"run1~b2b2b2b2"]
    assert world.names(world.at(ROOT_INO, b"run1~b2b2b2b2").ino)[0] == record.name.encode()
    long = b"x" * 300
    world.histories.make(C, long, 0)
    world.histories.publish(C, world.trees.dir(b"top"))
    shown = [n for n in world.names(root.ino) if n.startswith(b"x")]
    assert [len(n) <= 255 for n in shown] == [True]
    assert world.browse.lookup(root.ino, shown[0])


def test_a_unit_below_closed_directories_is_not_opened_at_the_root(world: World) -> None:
    live = world.live
    live.make(20, ROOT_INO, b"a", 0o700, uid=1)
    live.make(21, 20, b"b", 0o755, uid=2)
    live.deep.add(21)
    world.histories.make(B, b"a/b", 21)
    assert world.at(ROOT_INO, b"a%2Fb").mode == DIR | 0o700
    live.make(20, ROOT_INO, b"a", 0o750, uid=1, gid=1000)
    assert world.at(ROOT_INO, b"a%2Fb").mode == DIR | 0o750
    live.make(20, ROOT_INO, b"a", 0o755, uid=1)
    assert world.at(ROOT_INO, b"a%2Fb").mode == DIR | 0o755


@pytest.mark.parametrize(
    ("mode", "gid", "guards", "expected"),
    [
        (0o777, 5, [(0o755, 1)], 0o777),
        (0o777, 5, [(0o754, 5)], 0o770),
        (0o777, 5, [(0o750, 6)], 0o700),
        (0o777, 5, [(0o055, 5)], 0o700),
        (0o777, 5, [(0o705, 5)], 0o700),
        (0o777, 5, [(0o711, 1), (0o750, 5)], 0o770),
    ],
)
def test_mode_behind(mode: int, gid: int, guards: list[tuple[int, int]], expected: int) -> None:
    inodes = [Inode(DIR | m, 1, g, (), 0, 0, 0) for m, g in guards]
    assert mode_behind(DIR | mode, gid, inodes) == DIR | expected


def test_a_directory_made_again_does_not_open_what_lay_behind_a_closed_one(world: World) -> None:
    """run1/secret was closed; somebody makes run1/secret/b anew and looks into its past."""
    trees = world.trees
    inner = trees.dir(b"b", file(b"key", mode=0o644))
    record = world.histories.publish(A, trees.dir(b"top", trees.dir(b"secret", inner, mode=0o700, uid=7)))
    world.live.make(12, 10, b"secret", 0o755, uid=8)
    world.live.make(13, 12, b"b", 0o755, uid=8)
    assert world.at(13, record.name.encode()).mode == DIR | 0o700


def test_a_removed_directory_has_no_versions(world: World) -> None:
    inside = world.at(11, b"latest-complete")
    top = world.at(11)
    world.live.remove(11)
    with pytest.raises(PosixError):
        world.browse.attributes(top.ino)
    with pytest.raises(PosixError):
        world.browse.readlink(inside.ino)


def test_a_directory_that_was_never_published_lists_nothing(world: World) -> None:
    world.live.make(30, ROOT_INO, b"new")
    assert world.names(world.at(30).ino) == []
    with pytest.raises(NotFound):
        world.browse.lookup(world.at(30).ino, b"latest")
    assert world.browse.is_versions_dir(world.at(30).ino) == 30


def test_where_a_name_may_be_made(world: World) -> None:
    name = world.histories.versions(A)[1].name.encode()
    world.histories.make(C, b"old", 0)
    world.histories.publish(C, world.trees.dir(b"top"))
    assert world.browse.is_versions_dir(world.at(10).ino) == 10
    assert world.browse.is_versions_dir(world.at(11).ino) == 11
    assert world.browse.is_versions_dir(world.at(ROOT_INO, b"run1").ino) == 10
    for closed in (
        world.at(ROOT_INO),
        world.at(ROOT_INO, b"old"),
        world.at(10, name),
        world.at(10, b"latest"),
        world.at(10, name + b"/sub"),
    ):
        assert world.browse.is_versions_dir(closed.ino) is None
    made = world.browse.version_directory(11, A, 2)
    assert made.ino != world.at(11, name).ino and stat.S_ISDIR(made.mode)
    world.browse.remember(made.ino)
    assert world.names(made.ino) == [b"deep", b"model.pt"]
    with pytest.raises(NotFound):
        world.browse.version_directory(11, A, 1)
    assert world.browse.has(world.at(10).ino, b"best") and not world.browse.has(world.at(10).ino, b"worst")


def test_a_root_that_is_a_run_lists_its_own_versions_too(world: World) -> None:
    world.live.root_is_run = True
    world.histories.make(B, b"@root", ROOT_INO)
    record = world.histories.publish(
        B, world.trees.dir(b"top", world.trees.dir(b"run1", world.trees.dir(b"sub")))
    )
    root = world.at(ROOT_INO)
    name = record.name.encode()
    assert set(world.names(root.ino, 1)) == {name, b"latest", b"latest-complete", b"run1", b"@root"}
    assert world.names(world.at(11, name).ino) == []
    assert world.browse.is_versions_dir(root.ino) == ROOT_INO


def test_the_files_of_the_root_are_a_unit(world: World) -> None:
    world.histories.make(B, b"@root", ROOT_INO)
    record = world.histories.publish(B, world.trees.dir(b"top", file(b"notes.txt")))
    assert sorted(world.names(world.at(ROOT_INO).ino)) == [b"@root", b"run1"]
    assert world.at(ROOT_INO, b"@root/" + record.name.encode() + b"/notes.txt").size == 5
    assert world.browse.is_versions_dir(world.at(ROOT_INO, b"@root").ino) == ROOT_INO
    made = world.browse.version_directory(ROOT_INO, B, record.number)
    assert world.names(made.ino) == [b"notes.txt"]


def test_links_follow_new_versions_and_forgotten_ones(world: World) -> None:
    latest = world.at(10, b"latest").ino
    step = world.at(10, b"step-100").ino
    newer = world.histories.publish(A, world.trees.dir(b"top"), steps=(100, 300))
    assert world.browse.readlink(latest) == newer.name.encode() == world.browse.readlink(step)
    assert b"step-300" in world.names(world.at(10).ino)
    gone = world.at(10, newer.name.encode())
    world.histories.forget(A, newer.number)
    assert world.browse.readlink(latest) == world.histories.versions(A)[-1].name.encode()
    assert b"step-300" not in world.names(world.at(10).ino)
    for ask in (world.browse.attributes, lambda ino: world.browse.entries(ino, 0, 9)):
        with pytest.raises(NotFound):
            ask(gone.ino)


def test_a_listing_goes_on_where_it_was_whatever_comes_and_goes(world: World) -> None:
    top = world.at(10).ino
    before = world.names(top)
    for at in range(len(before)):
        rows = world.browse.entries(top, 0, at + 1)
        seen = [name for _, name, _ in rows]
        number = world.histories.publish(A, world.trees.dir(b"top"), State.OPAQUE).number
        seen += [name for _, name, _ in world.browse.entries(top, rows[-1][0], 1000)]
        assert [name for name in seen if name in before] == before
        world.histories.forget(A, number)


def test_a_damaged_directory_does_not_hide_the_others(world: World) -> None:
    trees = world.trees
    bad = trees.dir(b"sub", file(b"x"))
    record = world.histories.publish(A, trees.dir(b"top", bad, file(b"y")))
    assert bad.tree is not None and record.top.tree is not None
    trees.damaged = {bad.tree}
    name = record.name.encode()
    assert world.names(world.at(10, name).ino) == [b"sub", b"y"]
    with pytest.raises(Corrupt):
        world.browse.entries(world.at(10, name + b"/sub").ino, 0, 10)
    trees.damaged = {record.top.tree}
    world.restart()
    assert name in world.names(world.at(10).ino)
    assert name not in world.names(world.at(11).ino)
    with pytest.raises(Corrupt):
        world.at(11, name)


def test_find_over_a_large_directory_gives_its_memory_back(world: World) -> None:
    files = [file(b"shard-%06d" % n) for n in range(100_000)]
    record = world.histories.publish(A, world.trees.dir(b"top", world.trees.dir(b"big", *files)))
    top = world.at(10, record.name.encode() + b"/big")
    after, seen = 0, []
    while rows := world.browse.entries(top.ino, after, 128):
        # The kernel's buffer takes 30 of them; it asks again for the rest.
        for cookie, _, attributes in rows[:30]:
            world.browse.remember(attributes.ino)
            seen.append(attributes.ino)
            after = cookie
    assert len(set(seen)) == 100_000
    table = world.browse._nodes
    assert len(table) == 100_000 + 3
    node_bytes = sys.getsizeof(table._held) + 100_000 * (sys.getsizeof(table.get(seen[0])) + 36)
    assert node_bytes < 25 << 20
    assert len({id(table.get(ino).place) for ino in seen}) == 1  # type: ignore[attr-defined]
    for ino in seen:
        world.browse.forget(ino, 1)
    assert len(table) == 3


def test_entries_that_are_not_remembered_cost_no_memory(world: World) -> None:
    files = [file(b"shard-%06d" % n) for n in range(10_000)]
    record = world.histories.publish(A, world.trees.dir(b"top", *files))
    top = world.at(10, record.name.encode())
    for _ in range(2):
        assert len(world.names(top.ino, 1000)) == 10_000
    assert len(world.browse._nodes) == 2 and len(world.browse._nodes._recent) <= 4096
    with pytest.raises(NotFound):
        world.browse.attributes(FIRST_VIRTUAL_INO | 5)
    world.browse.forget(FIRST_VIRTUAL_INO | 5, 1)


def test_lookup_counts(world: World) -> None:
    world.browse.remember(world.browse.versions_dir(10).ino)
    top = world.browse.versions_dir(10).ino
    world.browse.remember(top)
    latest = world.browse.lookup(top, b"latest").ino
    world.browse.remember(latest)
    world.browse.forget(top, 2)
    assert world.browse.readlink(latest)
    world.browse.forget(latest, 1)
    assert len(world.browse._nodes) == 0


def test_ten_thousand_versions_are_listed(world: World) -> None:
    top = world.trees.dir(b"top", world.trees.dir(b"sub"))
    for number in range(4, 10_001):
        world.histories.publish(A, top, State.PARTIAL if number % 2 else State.COMPLETE, steps=(number,))
    for live in (10, 11):
        ino = world.at(live).ino
        after = count = 0
        while rows := world.browse.entries(ino, after, 128):
            after = rows[-1][0]
            count += len(rows)
        assert count > 14_000


def test_how_long_answers_may_be_kept(world: World) -> None:
    name = world.histories.versions(A)[1].name.encode()
    assert [
        world.browse.timeout_s(world.at(10, path).ino) for path in (b"", b"latest", name, name + b"/sub")
    ] == [1, 0, 1, 1]


def test_paths_for_the_log(world: World) -> None:
    name = world.histories.versions(A)[1].name.encode()
    for live, path, expected in (
        (10, b"", b"/run1/.versions"),
        (ROOT_INO, b"", b"/.versions"),
        (ROOT_INO, b"run1", b"/run1/.versions"),
        (10, b"latest", b"/run1/.versions/latest"),
        (10, name, b"/run1/.versions/" + name),
        (11, name + b"/model.pt", b"/run1/.versions/" + name + b"/sub/model.pt"),
    ):
        assert world.browse.path_of(world.at(live, path).ino) == expected


@pytest.mark.parametrize(
    ("saved", "live", "live_gid", "shown"),
    [
        (0o755, 0o755, 5, 0o755),
        (0o705, 0o705, 5, 0o705),
        (0o755, 0o700, 5, 0o700),
        (0o700, 0o777, 5, 0o700),
        (0o775, 0o750, 5, 0o750),
        (0o775, 0o770, 6, 0o700),
        (0o775, 0o775, 6, 0o755),
    ],
)
def test_a_saved_directory_gives_no_more_than_it_gives_today(
    saved: int, live: int, live_gid: int, shown: int
) -> None:
    assert mode_today(DIR | saved, 5, Inode(DIR | live, 1, live_gid, (), 0, 0, 0)) == DIR | shown
