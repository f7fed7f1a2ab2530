"""What a disk may hold after a crash, told from the log of the calls that were made to it.

One rule: everything here is a value and knows nothing of ckptfs; what a sync promises is what FORMAT.md,
"What is assumed of the disk", says and no more. Writes count by sectors of 512 bytes, changes of names one
by one; without a sync any of them may be there or not, in any order, a rename whole or not at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from blake3 import blake3
from disklog import (
    ROOT,
    AllSynced,
    Committed,
    DataEvent,
    Event,
    FolderSynced,
    Names,
    Place,
    Punch,
    Resize,
    Synced,
    SyncFailed,
    Write,
)

BLOCK_BYTES = 4096
SECTOR_BYTES = 512
_SECTORS = BLOCK_BYTES // SECTOR_BYTES
_ZEROS = bytes(BLOCK_BYTES)


# ---- one file ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """The content of a file: its allocated blocks, and its length."""

    blocks: Mapping[int, bytes] = field(default_factory=dict)
    size: int = 0

    def after(self, event: DataEvent) -> Held:
        """The content once the event has happened."""
        match event:
            case Write(_, offset, payload):
                return self._written(offset, payload)
            case Resize(_, size):
                return self._resized(size)
        return self._punched(event.offset, event.length)

    def digest(self) -> bytes:
        """What tells this content from others, the place of its holes included."""
        known: bytes | None = self.__dict__.get("_digest")
        if known is None:
            parts = [f"{self.size}".encode()]
            parts += [b"%d" % n + self.blocks[n] for n in sorted(self.blocks)]
            known = blake3(b"|".join(parts)).digest()
            self.__dict__["_digest"] = known
        return known

    def runs(self) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of allocated neighbours, cut at the length."""
        at, parts = 0, list[bytes]()
        for number in sorted(self.blocks):
            if parts and number * BLOCK_BYTES != at + len(parts) * BLOCK_BYTES:
                yield at, b"".join(parts)[: max(self.size - at, 0)]
                parts = []
            if not parts:
                at = number * BLOCK_BYTES
            parts.append(self.blocks[number])
        if parts:
            yield at, b"".join(parts)[: max(self.size - at, 0)]

    def _written(self, offset: int, payload: bytes) -> Held:
        blocks = dict(self.blocks)
        end = offset + len(payload)
        for number in range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            start = number * BLOCK_BYTES
            first, last = max(offset, start), min(end, start + BLOCK_BYTES)
            old = blocks.get(number, _ZEROS)
            part = payload[first - offset : last - offset]
            blocks[number] = old[: first - start] + part + old[last - start :]
        return Held(blocks, max(self.size, end) if payload else self.size)

    def _resized(self, size: int) -> Held:
        if size >= self.size:
            return Held(self.blocks, size)
        last, rest = divmod(size, BLOCK_BYTES)
        blocks = {n: b for n, b in self.blocks.items() if n < last + (rest > 0)}
        if rest and last in blocks:
            blocks[last] = blocks[last][:rest] + _ZEROS[rest:]
        return Held(blocks, size)

    def _punched(self, offset: int, length: int) -> Held:
        whole = range(-(-offset // BLOCK_BYTES), (offset + length) // BLOCK_BYTES)
        blocks = {n: b for n, b in self.blocks.items() if n not in whole}
        return Held(blocks, self.size)


def mixed(states: Sequence[Held], pick: Callable[[int], Held], size: int) -> Held:
    """What a disk may hold of a file that was in these states since its sync, the synced one first.

    `pick` says, for the number of a sector, from which state it is. A block that had no place on the disk
    is there whole, or not at all.
    """
    blocks: dict[int, bytes] = {}
    for number in sorted({n for state in states for n in state.blocks}):
        first = number * _SECTORS
        if number not in states[0].blocks:
            whole = pick(first).blocks.get(number)
        else:
            parts = [(pick(first + i).blocks.get(number), i * SECTOR_BYTES) for i in range(_SECTORS)]
            there = [(part or _ZEROS)[at : at + SECTOR_BYTES] for part, at in parts]
            whole = b"".join(there) if any(part is not None for part, _ in parts) else None
        if whole is not None:
            blocks[number] = whole
    longest = max(size, *(state.size for state in states))
    return Held(blocks, longest).after(Resize(0, size))


# ---- the whole disk ---------------------------------------------------------------------------------


@dataclass
class FileNode:
    """A file: what is durable, and what happened since."""

    durable: Held = field(default_factory=Held)
    now: Held = field(default_factory=Held)
    pending: list[DataEvent] = field(default_factory=list)
    is_doubtful: bool = False

    def surely(self) -> Held:
        """What a sync makes durable: all, but for what an earlier one that failed has dropped."""
        if not self.is_doubtful:
            return self.now
        held = self.durable
        for event in self.pending:
            held = held.after(event)
        return held


@dataclass(frozen=True)
class Image:
    """What is found after a crash: files by path, equal numbers being one file; and the folders."""

    folders: tuple[str, ...]
    files: Mapping[str, tuple[int, Held]]
    folder_nodes: Mapping[str, int]

    def without(self, folder: str) -> Image:
        """As if somebody had deleted a folder at the top, and that was durable."""
        folders = tuple(one for one in self.folders if one.partition("/")[0] != folder)
        files = {path: file for path, file in self.files.items() if path.partition("/")[0] != folder}
        return Image(folders, files, {one: self.folder_nodes[one] for one in folders})

    def digest(self) -> bytes:
        """What tells this image from others."""
        first: dict[int, str] = {}
        parts = ["/".join(self.folders).encode()]
        for path in sorted(self.files):
            number, held = self.files[path]
            parts += [path.encode(), first.setdefault(number, path).encode(), held.digest()]
        return blake3(b"\0".join(parts)).digest()


class DiskModel:
    """Follows a log. `files` and the names, durable and pending, at the place that was reached."""

    def __init__(self, base: Image | None = None) -> None:
        self.files: dict[int, FileNode] = {}
        self.names: dict[int, dict[str, Place]] = {ROOT: {}}
        self.pending_names: list[Names] = []
        if base is not None:
            self._start_from(base)

    def _start_from(self, base: Image) -> None:
        for folder in base.folders:
            node = base.folder_nodes[folder]
            self.names.setdefault(node, {})
            self._put(base, folder, node, is_folder=True)
        for path, (node, held) in base.files.items():
            self.files[node] = FileNode(held, held)
            self._put(base, path, node, is_folder=False)

    def _put(self, base: Image, path: str, node: int, *, is_folder: bool) -> None:
        folder, _, name = path.rpartition("/")
        parent = base.folder_nodes[folder] if folder else ROOT
        self.names.setdefault(parent, {})[name] = Place(parent, name, node, is_folder)

    def fork(self) -> DiskModel:
        """A copy that goes its own way."""
        other = DiskModel()
        other.files = {
            n: FileNode(f.durable, f.now, list(f.pending), f.is_doubtful) for n, f in self.files.items()
        }
        other.names = {n: dict(places) for n, places in self.names.items()}
        other.pending_names = list(self.pending_names)
        return other

    def take(self, event: Event) -> None:
        """Go one step on in the log."""
        match event:
            case Write(file) | Resize(file) | Punch(file):
                node = self._file(file)
                node.now = node.now.after(event)
                node.pending.append(event)
            case Synced(file):
                node = self._file(file)
                node.durable, node.pending = node.surely(), []
            case SyncFailed(file):
                self._file(file).pending.clear()
                self._file(file).is_doubtful = True
            case Committed(file, size, blocks):
                held = Held({**self._file(file).now.blocks, **blocks}, size)
                self.files[file] = FileNode(held, held)
            case Names(places):
                for place in places:
                    if place.node is not None and not place.is_folder:
                        self._file(place.node)
                self.pending_names.append(event)
            case FolderSynced(folder):
                self._sync_folder(folder)
            case AllSynced():
                for number, node in self.files.items():
                    self.files[number] = FileNode(node.surely(), node.now, [], node.is_doubtful)
                for change in self.pending_names:
                    _apply(self.names, change)
                self.pending_names = []

    def _file(self, file: int) -> FileNode:
        return self.files.setdefault(file, FileNode())

    def _sync_folder(self, folder: int) -> None:
        left = []
        for event in self.pending_names:
            if any(place.folder == folder for place in event.places):
                _apply(self.names, event)
            else:
                left.append(event)
        self.pending_names = left

    # -- images ----------------------------------------------------------------------------------------

    def killed(self) -> Image:
        """Everything that was done is there: the process died, the machine did not."""
        return self._image(self.pending_names, {n: f.now for n, f in self.files.items()})

    def power_cut(self, kind: str, chance: random.Random) -> Image | None:
        """One of the images that a loss of power may leave; None if this kind says nothing new here.

        `synced`: what was synced and nothing else. `names`: all names, synced bytes (ext4). `bytes`: all
        bytes under the synced names. `zeros`: all names, and lengths without the bytes. `torn512`,
        `torn4096`: all but some units of the last write. `prefix`: names up to some moment. `any`: a random
        subset of everything.
        """
        pending = {n: f.pending for n, f in self.files.items() if f.pending}
        of_names, of_bytes = kind in ("names", "prefix", "any"), kind not in ("synced", "names", "prefix")
        if kind != "synced" and not (of_names and self.pending_names) and not (of_bytes and pending):
            return None
        names, held = self.pending_names, dict[int, Held]()
        match kind:
            case "synced":
                names = []
            case "names":
                pass
            case "bytes":
                names, held = [], {n: self.files[n].now for n in pending}
            case "prefix":
                names = names[: chance.randint(0, len(names))]
                held = {n: self.files[n].now for n in pending if chance.random() < 0.5}
            case "zeros":
                held = self._lengths(pending)
            case "any":
                likely = chance.choice((0.2, 0.5, 0.9))
                names = [event for event in names if chance.random() < likely]
                held = {n: _some_of(self.files[n].durable, events, chance) for n, events in pending.items()}
            case _:
                held = self._torn(pending, int(kind.removeprefix("torn")), chance)
        return self._image(names, held) if held or kind in ("synced", "names", "prefix", "any") else None

    def _lengths(self, pending: Mapping[int, list[DataEvent]]) -> dict[int, Held]:
        found = {}
        for number, events in pending.items():
            held = self.files[number].durable
            for event in events:
                if isinstance(event, Write):
                    event = Resize(number, max(held.size, event.offset + len(event.payload)))
                held = held.after(event)
            found[number] = held
        return found

    def _torn(
        self, pending: Mapping[int, list[DataEvent]], unit: int, chance: random.Random
    ) -> dict[int, Held]:
        last = [n for n, events in pending.items() if isinstance(events[-1], Write)]
        if not last:
            return {}
        found = {n: self.files[n].now for n in pending}
        number = chance.choice(last)
        before, whole = _states(self.files[number].durable, pending[number])[-2:]
        write = pending[number][-1]
        assert isinstance(write, Write)
        end = write.offset + len(write.payload)
        units = range(write.offset // unit, -(-end // unit))
        if len(units) < 2:
            return {}
        if chance.random() < 0.5:
            keep = set(list(units)[: chance.randrange(len(units))])
        else:
            keep = {n for n in units if chance.random() < 0.5}
        size = max([before.size, *(min((n + 1) * unit, end) for n in keep)])
        states = [self.files[number].durable, before, whole]

        def pick(sector: int) -> Held:
            return whole if sector * SECTOR_BYTES // unit in keep else before

        found[number] = mixed(states, pick, size)
        return found

    def _image(self, changes: Iterable[Names], held: Mapping[int, Held]) -> Image:
        names = {n: dict(places) for n, places in self.names.items()}
        for event in changes:
            _apply(names, event)
        folders: dict[str, int] = {}
        files: dict[str, tuple[int, Held]] = {}
        todo = [("", ROOT)]
        while todo:
            path, node = todo.pop()
            for name, place in names.get(node, {}).items():
                below = f"{path}/{name}" if path else name
                assert place.node is not None
                if place.is_folder:
                    folders[below] = place.node
                    todo.append((below, place.node))
                else:
                    files[below] = (place.node, held.get(place.node, self.files[place.node].durable))
        return Image(tuple(sorted(folders)), files, folders)


def _apply(names: dict[int, dict[str, Place]], event: Names) -> None:
    for place in event.places:
        folder = names.setdefault(place.folder, {})
        if place.node is None:
            folder.pop(place.name, None)
        else:
            folder[place.name] = place


def _states(held: Held, events: Iterable[DataEvent]) -> list[Held]:
    states = [held]
    for event in events:
        states.append(states[-1].after(event))
    return states


def _some_of(held: Held, events: list[DataEvent], chance: random.Random) -> Held:
    """Each sector, or each block, as it was at some moment; and so the length."""
    states = _states(held, events)
    unit = chance.choice((1, _SECTORS))
    picks: dict[int, Held] = {}

    def pick(sector: int) -> Held:
        return picks.setdefault(sector // unit, chance.choice((*states, states[-1])))

    return mixed(states, pick, chance.choice((*states, states[-1])).size)
