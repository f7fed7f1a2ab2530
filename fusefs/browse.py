"""The hidden `.versions` of every directory: past versions as read-only directories.

One rule: what a version shows is what was saved; the way to it has the rights of today
(browse_tops.py).

    DIR/.versions/v000042_20261129T160211Z/…      DIR as it was
    DIR/.versions/latest, latest-complete, TAG, step-N      symbolic links to the above
    /.versions/UNIT/…                             every unit that ever was, each like its own .versions

A link count of 1 on a directory means "not counted", as on btrfs. Saved directories count their
subdirectories; a file that was a hard link counts the names it had in its version (at least 2, and
only those in its directory once a version has more than 10,000 entries).

Source: ARCHITECTURE.md §4, "Browse".
"""

from __future__ import annotations

import stat
from dataclasses import replace

from ckptfs.fusefs.attributes import Attributes
from ckptfs.fusefs.browse_listing import Listings, Shown, Trees, VersionSource, entry_named
from ckptfs.fusefs.browse_nodes import (
    Base,
    LinkNode,
    Node,
    NodeTable,
    Place,
    SavedNode,
    UnitNode,
    VersionNode,
    VersionsNode,
    virtual_ino,
)
from ckptfs.fusefs.browse_rights import mode_today
from ckptfs.fusefs.browse_saved import SavedTrees
from ckptfs.fusefs.browse_tops import LiveTree, LiveUnits, Tops
from ckptfs.fusefs.errnos import PosixError
from ckptfs.store.errors import NotFound
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import CidCodec, RecipeId, TreeId, UnitId, cid_text
from ckptfs.store.tree import Entry

# What was saved never changes. A version may be forgotten and `.versions` takes its rights from a
# directory on the way to it, so a second does no harm. Links move on at every publish, and
# `.versions/UNIT` is reached without its directory.
_SAVED_TIMEOUT_S = 3600.0
_VERSION_TIMEOUT_S = 1.0
_PAGE_ROWS = 1024
Row = tuple[int, bytes, Attributes]


class Browse:
    """Every method belongs to the index thread, which is the trio thread.

    The caller refuses what would change something, calls `remember` for each inode that it tells
    the kernel of (right after the call that returned it) and `forget` when the kernel does.
    NotFound: there is nothing of this name, or no longer. Corrupt: a saved directory is damaged.
    """

    def __init__(
        self, trees: Trees, histories: VersionSource, live: LiveTree, units: LiveUnits, nodes: NodeTable
    ) -> None:
        self._histories = histories
        self._live = live
        self._tops = Tops(histories, live, units)
        self._listings = Listings(trees, histories)
        self._saved = SavedTrees(trees)
        self._nodes = nodes
        self._page: tuple[Place, list[tuple[Row, Node]]] | None = None

    # ---- what the kernel holds --------------------------------------------------------------

    def remember(self, ino: int) -> None:
        """The kernel was told of an inode once more."""
        self._nodes.remember(ino)

    def forget(self, ino: int, count: int) -> None:
        """The kernel forgot it `count` times."""
        self._nodes.forget(ino, count)
        if not len(self._nodes):
            self._listings.clear()
            self._saved.clear()
            self._page = None

    def timeout_s(self, ino: int) -> float:
        """How long the kernel may keep an answer."""
        node = self._nodes.get(ino)
        if isinstance(node, SavedNode) and not node.is_dir:
            return _SAVED_TIMEOUT_S
        return _VERSION_TIMEOUT_S if isinstance(node, SavedNode | VersionNode | VersionsNode) else 0.0

    # ---- names ------------------------------------------------------------------------------

    def versions_dir(self, directory: int) -> Attributes:
        """The `.versions` of a live directory."""
        return self._noted(VersionsNode(directory))

    def is_versions_dir(self, ino: int) -> int | None:
        """The live directory in whose `.versions` a name may be made; None: everything here is read-only."""
        node = self._nodes.get(ino)
        return self._tops.published_below(node) if isinstance(node, VersionsNode | UnitNode) else None

    def version_directory(self, directory: int, unit: UnitId, number: int) -> Attributes:
        """The directory that answers `mkdir DIR/.versions/NAME`: DIR in version `number`.

        Its inode is not that of the version's own name, so that no directory has two names.
        """
        base = self._tops.base(VersionsNode(directory))
        top = self._histories.unit_of_ino(directory)
        if top is not None and top.unit == unit:
            path = b""
        elif base is not None and base.unit == unit:
            path = base.path
        else:
            raise NotFound("the directory has moved to another unit")
        made = Base(virtual_ino(b"made", directory, unit, number), unit, path)
        return self._noted(VersionNode(self._version_place(made, number)))

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """The attributes of a name in a directory."""
        node = self._nodes.get(parent)
        if name == b".":
            return self.attributes(parent)
        if isinstance(node, SavedNode | VersionNode):
            place = self._place_inside(node)
            entry = entry_named(self._saved.read(place.tree), name)
            if entry is None:
                raise _nothing(name)
            return self._noted(SavedNode.of(place, entry))
        if isinstance(node, VersionsNode | UnitNode):
            return self._noted(self._listed(node, name))
        raise _nothing(name)

    def has(self, parent: int, name: bytes) -> bool:
        """Whether a directory has a name."""
        try:
            self.lookup(parent, name)
        except NotFound:
            return False
        return True

    def entries(self, ino: int, after: int, limit: int) -> list[Row]:
        """Up to `limit` (cookie, name, attributes) behind the cookie `after`; 0 begins, empty ends."""
        node = self._nodes.get(ino)
        limit = min(limit, _PAGE_ROWS)
        if isinstance(node, SavedNode | VersionNode):
            return self._saved_page(self._place_inside(node), after, limit)
        rows: list[Row] = []
        if isinstance(node, VersionsNode | UnitNode):
            base = self._tops.base(node)
            if base is not None:
                shown = self._listings.of(base).behind(after, limit)
                rows = [(s.cookie, s.name, self._shown(node, base, s)) for s in shown]
            if len(rows) < limit and self._tops.lists_units(node):
                units = self._tops.units_behind(after, limit - len(rows))
                rows += [(cookie, name, self._noted(UnitNode(unit))) for cookie, name, unit in units]
        return rows

    def readlink(self, ino: int) -> bytes:
        """The target of a symbolic link."""
        node = self._nodes.get(ino)
        if isinstance(node, LinkNode):
            return self._linked(node)[0].name.encode()
        target = self._entry(node).target if isinstance(node, SavedNode) else None
        if target is None:
            raise NotFound("this is not a symbolic link")
        return target

    # ---- attributes -------------------------------------------------------------------------

    def attributes(self, ino: int) -> Attributes:
        """What stat(2) shows."""
        return self._attributes(self._nodes.get(ino))

    def recipe(self, ino: int) -> RecipeId:
        """The recipe of a regular file."""
        node = self._nodes.get(ino)
        recipe = self._entry(node).recipe if isinstance(node, SavedNode) else None
        if recipe is None:
            raise NotFound("this is not a regular file")
        return recipe

    def xattrs(self, ino: int) -> dict[bytes, bytes]:
        """The saved extended attributes and, of files and directories, user.ckptfs.cid, .root, .version.

        .root is there for files (the file root) and for the unit's directory (that of the version).
        """
        node = self._nodes.get(ino)
        if not isinstance(node, SavedNode | VersionNode):
            return {}
        entry = self._entry(node)
        xattrs = dict(entry.xattrs)
        record = self._histories.version(node.place.unit, node.place.number)
        if record is None or not (entry.recipe or entry.tree):
            return xattrs
        is_top = isinstance(node, VersionNode) and not node.place.path
        root = record.root if is_top else entry.root
        cid = cid_text(entry.recipe) if entry.recipe else cid_text(entry.tree or b"", CidCodec.DAG_CBOR)
        xattrs[b"user.ckptfs.cid"] = cid.encode()
        xattrs[b"user.ckptfs.version"] = record.name.encode()
        if root is not None:
            xattrs[b"user.ckptfs.root"] = root.hex().encode()
        return xattrs

    def xattr(self, ino: int, name: bytes) -> bytes | None:
        """One extended attribute, None if it is not set."""
        return self.xattrs(ino).get(name)

    def listxattr(self, ino: int) -> list[bytes]:
        """The names of the saved extended attributes."""
        node = self._nodes.get(ino)
        saved = self._entry(node).xattrs if isinstance(node, SavedNode | VersionNode) else ()
        return [name for name, _ in saved]

    def sibling_recipe(self, ino: int, name: bytes) -> RecipeId | None:
        """The content of the file `name` beside a saved file."""
        node = self._nodes.get(ino)
        if not isinstance(node, SavedNode):
            return None
        entry = entry_named(self._saved.read(node.place.tree), name)
        return None if entry is None else entry.recipe

    def path_of(self, ino: int) -> bytes:
        """A path for people, such as b"/run1/.versions/v000042_…/model/a"."""
        node = self._nodes.get(ino)
        if isinstance(node, VersionsNode):
            return self._live.path_of(node.live).rstrip(b"/") + b"/.versions"
        if isinstance(node, LinkNode):
            return self.path_of(node.listing.ino) + b"/" + node.name
        assert isinstance(node, UnitNode | VersionNode | SavedNode)
        unit = self._histories.unit(node.unit if isinstance(node, UnitNode) else node.place.unit)
        path = b"/" + (unit.name if unit is not None else b"?") + b"/.versions"
        if isinstance(node, SavedNode | VersionNode):
            record = self._histories.version(node.place.unit, node.place.number)
            inner = node.place.path_of(node.name) if isinstance(node, SavedNode) else node.place.path
            path += b"/" + (record.name.encode() if record is not None else b"?") + b"/" + inner
        return path.rstrip(b"/")

    # ---- nodes ------------------------------------------------------------------------------

    def _noted(self, node: Node) -> Attributes:
        attributes = self._attributes(node)
        self._nodes.note(node)
        return attributes

    def _attributes(self, node: Node) -> Attributes:
        match node:
            case VersionsNode() | UnitNode():
                return self._tops.attributes(node)
            case LinkNode():
                return self._link_attributes(node)
            case SavedNode():
                siblings = self._saved.read(node.place.tree)
                entry = self._closed_today(node.place, self._entry(node))
                return self._saved.attributes(node.ino, entry, self._top_tree(node.place), siblings)
            case VersionNode():
                return self._saved.attributes(node.ino, self._entry(node), self._top_tree(node.place))
        raise AssertionError("a node of an unknown kind")

    def _listed(self, node: VersionsNode | UnitNode, name: bytes) -> Node:
        """What a `.versions` has under a name."""
        base = self._tops.base(node)
        number = None if base is None else self._listings.number_of(base, name)
        if base is not None and number is not None and self._listings.directory(base, number) is not None:
            record = self._record(base.unit, number)
            if record.name.encode() == name:
                return VersionNode(self._version_place(base, number))
            return LinkNode(node, name)
        unit = self._tops.unit_named(name) if self._tops.lists_units(node) else None
        if unit is None:
            raise _nothing(name)
        return UnitNode(unit)

    def _shown(self, node: VersionsNode | UnitNode, base: Base, shown: Shown) -> Attributes:
        """The attributes of a row of a listing."""
        assert shown.entry.tree is not None, "a version shows a directory"
        if shown.target is not None:
            link = LinkNode(node, shown.name)
            self._nodes.note(link)
            return _of_link(link.ino, shown.target, shown.entry, shown.time_ns)
        place = Place(base.ino, base.unit, shown.number, base.path, shown.entry.tree)
        version = VersionNode(place)
        self._nodes.note(version)
        return self._saved.attributes(version.ino, shown.entry, shown.entry.tree)

    def _version_place(self, base: Base, number: int) -> Place:
        entry = self._listings.directory(base, number)
        if entry is None or entry.tree is None:
            raise NotFound(f"the directory is not in version {number}")
        return Place(base.ino, base.unit, number, base.path, entry.tree)

    def _linked(self, node: LinkNode) -> tuple[VersionRecord, Entry]:
        """The version that a link leads to now, and the shown directory in it."""
        base = self._tops.base(node.listing)
        number = None if base is None else self._listings.number_of(base, node.name)
        entry = None if base is None or number is None else self._listings.directory(base, number)
        if base is None or number is None or entry is None:
            raise _nothing(node.name)
        return self._record(base.unit, number), entry

    def _link_attributes(self, node: LinkNode) -> Attributes:
        record, entry = self._linked(node)
        return _of_link(node.ino, record.name.encode(), entry, record.time_ns)

    def _entry(self, node: SavedNode | VersionNode) -> Entry:
        """The saved entry of a node; NotFound once its version was forgotten."""
        place = node.place
        if isinstance(node, VersionNode):
            base = Base(place.base, place.unit, place.path)
            entry = self._listings.directory(base, place.number)
        else:
            alive = self._histories.has_version(place.unit, place.number)
            entry = entry_named(self._saved.read(place.tree), node.name) if alive else None
        if entry is None:
            raise NotFound(f"version {place.number} is gone")
        return entry

    def _place_inside(self, node: SavedNode | VersionNode) -> Place:
        """The place that a node is, if it is a directory."""
        if isinstance(node, VersionNode):
            self._record(node.place.unit, node.place.number)
            return node.place
        entry = self._entry(node)
        if entry.tree is None:
            raise _nothing(node.name)
        return node.place.inside(node.name, entry.tree)

    def _record(self, unit: UnitId, number: int) -> VersionRecord:
        record = self._histories.version(unit, number)
        if record is None:
            raise NotFound(f"version {number} is gone")
        return record

    def _top_tree(self, place: Place) -> TreeId:
        tree = self._record(place.unit, place.number).top.tree
        assert tree is not None, "the top of a version is a directory"
        return tree

    def _saved_page(self, place: Place, after: int, limit: int) -> list[Row]:
        """Rows of a saved directory; the cookie of an entry is its position, from 1.

        The kernel takes a few rows at a time and asks again, so what it left of a page is kept.
        """
        kept: list[tuple[Row, Node]] = []
        if self._page is not None and self._page[0] == place:
            place, kept = self._page
        page = [both for both in kept if both[0][0] > after] if kept and kept[0][0][0] <= after + 1 else []
        if not page:
            page = self._make_page(place, after, limit)
            self._page = (place, page)
        for _, node in page:
            self._nodes.note(node)
        return [row for row, _ in page[:limit]]

    def _make_page(self, place: Place, after: int, limit: int) -> list[tuple[Row, Node]]:
        entries, top = self._saved.read(place.tree), self._top_tree(place)
        page: list[tuple[Row, Node]] = []
        for cookie, entry in enumerate(entries[after : after + limit], after + 1):
            node = SavedNode.of(place, entry)
            shown = self._saved.attributes(node.ino, self._closed_today(place, entry), top, entries)
            page.append(((cookie, entry.name, shown), node))
        return page

    def _closed_today(self, place: Place, entry: Entry) -> Entry:
        """A saved directory whose live one was closed since is closed as well."""
        unit = self._histories.unit(place.unit) if entry.is_dir else None
        if unit is None or not unit.ino:
            return entry
        try:
            ino = self._live.at_path(self._live.path_of(unit.ino) + b"/" + place.path_of(entry.name))
            live = None if ino is None else self._live.find(ino)
        except PosixError:
            return entry
        if live is None or not live.is_dir:
            return entry
        return replace(entry, mode=mode_today(entry.mode, entry.gid, live))


def _of_link(ino: int, target: bytes, entry: Entry, time_ns: int) -> Attributes:
    """A link belongs to whom the directory belongs that it leads to."""
    return Attributes(
        ino=ino,
        mode=stat.S_IFLNK | 0o777,
        nlink=1,
        uid=entry.uid,
        gid=entry.gid,
        rdev=0,
        size=len(target),
        blocks=0,
        atime_ns=time_ns,
        mtime_ns=time_ns,
        ctime_ns=time_ns,
    )


def _nothing(name: bytes) -> NotFound:
    return NotFound(f"there is nothing named {name.decode(errors='backslashreplace')!r} here")
