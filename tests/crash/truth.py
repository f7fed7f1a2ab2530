"""What must be there after a crash, told from what was asked and answered.

One rule: nothing here asks ckptfs. After a kill the tree is what the answered calls made it, with or
without the one call that was not answered. After a loss of power the names are those of one moment, not
before the last sync; a file has what its last sync held or what it held since, sector by sector, and
beyond that it may be short or zeros, as on ext4; what was renamed over a durable file is the old or the
new file, whole. SEMANTICS.md, "After a power cut"; ARCHITECTURE §1.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from blake3 import blake3

SECTOR_BYTES = 512
FILE, FOLDER, LINK = "file", "folder", "link"


@dataclass(frozen=True, slots=True)
class Node:
    """What a name leads to: equal keys are one file."""

    kind: str
    key: int
    target: bytes = b""


@dataclass(frozen=True, slots=True)
class Content:
    """What a file held: `since[0]` at its last sync (or at first, empty), then after each change.

    `instead` are histories of files that it was renamed over: it may go back to one of them, whole.
    `is_doubtful`: a sync of it has failed, so that nobody knows what is on the disk (as on ext4).
    """

    since: tuple[bytes, ...] = (b"",)
    durable: bool = False
    instead: tuple[tuple[bytes, ...], ...] = ()
    is_doubtful: bool = False

    @property
    def now(self) -> bytes:
        """What a reader sees."""
        return self.since[-1]

    def changed(self, held: bytes) -> Content:
        """After a write or truncate."""
        return replace(self, since=(*self.since, held))

    def synced(self) -> Content:
        """After a sync."""
        return Content((self.now,), True, is_doubtful=self.is_doubtful)

    def replacing(self, other: Content, *, names: int) -> Content:
        """After a rename over `other`."""
        if not other.durable or (self.durable and len(self.since) == 1 and not self.instead):
            return self
        # A file of several names must not show the other file's bytes under all of them.
        instead = (*other.instead, other.since) if names == 1 else ()
        return Content((self.now,), True, instead, self.is_doubtful or other.is_doubtful)


Names: TypeAlias = Mapping[str, Node]


@dataclass(frozen=True, slots=True)
class State:
    """The tree at one moment."""

    names: Names = field(default_factory=dict)
    files: Mapping[int, Content] = field(default_factory=dict)

    def with_file(self, key: int, content: Content) -> State:
        """With another content of one file."""
        return State(self.names, {**self.files, key: content})

    def with_names(self, names: Names) -> State:
        """With other names."""
        return State(names, self.files)


@dataclass(frozen=True, slots=True)
class Op:
    """A call: `kind`, and what it takes. `outcome`: the names below `path` after it, and their files."""

    kind: str
    path: str = ""
    other: str = ""
    key: int = 0
    offset: int = 0
    payload: bytes = b""
    outcome: State | None = None

    def __str__(self) -> str:
        parts = [self.kind, self.path, self.other, f"at {self.offset}" if self.offset else ""]
        return " ".join(part for part in [*parts, f"{len(self.payload)} B" if self.payload else ""] if part)


def after(state: State, op: Op) -> State:
    """The tree once the call has happened."""
    names = dict(state.names)
    match op.kind:
        case "create":
            names[op.path] = Node(FILE, op.key)
            return State(names, {**state.files, op.key: Content()})
        case "mkdir" | "symlink":
            names[op.path] = Node(FOLDER if op.kind == "mkdir" else LINK, op.key, op.other.encode())
        case "link":
            names[op.other] = names[op.path]
        case "unlink" | "rmdir":
            del names[op.path]
        case "rename":
            return _renamed(state, op)
        case "exchange":
            names[op.path], names[op.other] = names[op.other], names[op.path]
        case "write":
            return state.with_file(op.key, state.files[op.key].changed(_written(state.files[op.key].now, op)))
        case "truncate":
            held = state.files[op.key].now[: op.offset].ljust(op.offset, b"\0")
            return state.with_file(op.key, state.files[op.key].changed(held))
        case "rollback":
            assert op.outcome is not None, "a rollback's outcome is noted before anybody asks for it"
            names = {path: node for path, node in names.items() if not path.startswith(op.path + "/")}
            names |= op.outcome.names
            state = State(names, {**state.files, **op.outcome.files})
        case "fsync":
            return state.with_file(op.key, state.files[op.key].synced())
    return state.with_names(names)


def _written(held: bytes, op: Op) -> bytes:
    return held[: op.offset].ljust(op.offset, b"\0") + op.payload + held[op.offset + len(op.payload) :]


def _renamed(state: State, op: Op) -> State:
    moved = {}
    for path, node in state.names.items():
        if path == op.path or path.startswith(op.path + "/"):
            moved[op.other + path[len(op.path) :]] = node
        elif path != op.other:
            moved[path] = node
    files = dict(state.files)
    source, target = state.names[op.path], state.names.get(op.other)
    if target is not None and target.kind == FILE and source.kind == FILE and target.key != source.key:
        names = sum(node.key == source.key for node in state.names.values())
        files[source.key] = files[source.key].replacing(files[target.key], names=names)
    return State(moved, files)


@dataclass(slots=True)
class Step:
    """A call, and the places in the log where it began and was answered."""

    op: Op
    began: int
    answered: int = 0


@dataclass(slots=True)
class Version:
    """A version: what it lists (None: not known), and the places in the log of what happened to it."""

    outline: dict[str, str]
    began: int
    answered: int = 0
    forgetting: int = 0
    forgotten: int = 0


VersionId: TypeAlias = tuple[bytes, int]


@dataclass(slots=True)
class Truth:
    """The whole story. `states[i]` holds from place `places[i]` of the log on; `floors` are those (by
    index) whose names were synced by then."""

    states: list[State] = field(default_factory=lambda: [State()])
    places: list[int] = field(default_factory=lambda: [0])
    floors: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    steps: list[Step] = field(default_factory=list)
    versions: dict[VersionId, Version] = field(default_factory=dict)
    tags: dict[tuple[bytes, str], tuple[int, int]] = field(default_factory=dict)

    @property
    def state(self) -> State:
        """The tree as all answered calls made it."""
        return self.states[-1]

    def begin(self, op: Op, place: int) -> Step:
        """A call is about to be made."""
        self.steps.append(Step(op, place))
        return self.steps[-1]

    def answer(self, step: Step, place: int) -> None:
        """It was answered."""
        step.answered = place
        self._enter(after(self.state, step.op), place)
        if step.op.kind in ("fsync", "fsyncdir", "rollback"):
            self.floors.append((place, len(self.states) - 1))

    def fail(self, step: Step, place: int, happened: Op | None) -> None:
        """It was answered with an error; what of it has happened all the same was looked at."""
        step.answered = place
        state = after(self.state, happened) if happened is not None else self.state
        if step.op.kind == "fsync":
            content = replace(state.files[step.op.key], is_doubtful=True)
            state = state.with_file(step.op.key, content)
        if state is not self.state:
            self._enter(state, place)

    def stored(self, keys: Iterable[int], place: int, *, floor: bool) -> None:
        """Files that are in the store now, synced; with `floor`, so are all names."""
        files = dict(self.state.files)
        for key in keys:
            files[key] = files[key].synced()
        self._enter(State(self.state.names, files), place)
        if floor:
            self.floors.append((place, len(self.states) - 1))

    def _enter(self, state: State, place: int) -> None:
        self.states.append(state)
        self.places.append(place)

    # -- what may be there -----------------------------------------------------------------------------

    def last(self, place: int) -> int:
        """The index of the newest state at a place of the log."""
        return max(i for i, since in enumerate(self.places) if since <= place)

    def floor(self, place: int) -> int:
        """The index of the oldest state whose names may be there."""
        return max(index for since, index in self.floors if since <= place)

    def moment(self, place: int) -> bytes:
        """What must be there at a place, told apart from other places where other things must be."""
        calls = [step.began for step in self.steps if step.began <= place and not 0 < step.answered <= place]
        versions = [
            (v.began <= place, v.answered <= place, 0 < v.forgetting <= place) for v in self.versions.values()
        ]
        return blake3(repr((self.last(place), self.floor(place), calls, versions)).encode()).digest()

    def unanswered(self, place: int) -> list[Op]:
        """The calls that were made and not answered."""
        return [s.op for s in self.steps if s.began <= place and not 0 < s.answered <= place]

    def check_killed(self, found: Tree, place: int) -> list[str]:
        """After a kill at a place: what is wrong with the tree that was found."""
        state = self.states[self.last(place)]
        wrong: list[str] = []
        for candidate in [state, *(after(state, op) for op in self.unanswered(place))]:
            problems = _differences(candidate, found)
            if not problems:
                return []
            wrong = wrong or problems
        return wrong

    def check_power_cut(self, found: Tree, place: int) -> list[str]:
        """After a loss of power at a place: what is wrong with the tree that was found."""
        last = self.last(place)
        ahead = [after(self.states[last], op) for op in self.unanswered(place)]
        wrong: list[str] = []
        for index in range(last + len(ahead), self.floor(place) - 1, -1):
            state = self.states[index] if index <= last else ahead[index - last - 1]
            problems = _name_differences(state, found)
            if problems:
                wrong = wrong or problems
                continue
            later = [*self.states[index + 1 : last + 1], *ahead] if index <= last else []
            problems = list(_content_problems(state, later, found))
            if not problems:
                return []
            wrong = problems
        return wrong


@dataclass(frozen=True, slots=True)
class Seen:
    """A name that was found, and what is behind it. Equal `inode` numbers are one file."""

    kind: str
    inode: int
    held: bytes = b""
    target: bytes = b""


Tree: TypeAlias = Mapping[str, Seen]


def outline(state: State, below: str = "") -> dict[str, str]:
    """Path → kind and hash of everything below a folder, as a version is to list it."""
    prefix = below + "/" if below else ""
    names = {p[len(prefix) :]: n for p, n in state.names.items() if p.startswith(prefix)}
    return {
        path: outline_line(n.kind, state.files[n.key].now if n.kind == FILE else n.target)
        for path, n in names.items()
    }


def outline_line(kind: str, held: bytes) -> str:
    """One name of an outline."""
    return kind if kind == FOLDER else f"{kind} {blake3(held).hexdigest()}"


def _name_differences(state: State, found: Tree) -> list[str]:
    wrong = [f"{path} is not there" for path in state.names.keys() - found.keys()]
    wrong += [f"{path} is there and should not be" for path in found.keys() - state.names.keys()]
    inodes: dict[int, int] = {}
    for path in state.names.keys() & found.keys():
        node, seen = state.names[path], found[path]
        if (node.kind, node.target) != (seen.kind, seen.target):
            wrong.append(f"{path} is a {seen.kind} {seen.target!r}, not a {node.kind} {node.target!r}")
        elif node.kind == FILE and inodes.setdefault(node.key, seen.inode) != seen.inode:
            wrong.append(f"{path} is not the same file as under its other name")
    if len(set(inodes.values())) != len(inodes):
        wrong.append("two files have become one")
    return sorted(wrong)


def _differences(state: State, found: Tree) -> list[str]:
    wrong = _name_differences(state, found)
    for path, node in state.names.items():
        if node.kind == FILE and path in found and found[path].held != state.files[node.key].now:
            was = f"{_brief(found[path].held)}, not {_brief(state.files[node.key].now)}"
            wrong.append(f"{path} holds {was}")
    return wrong


def _content_problems(state: State, later: list[State], found: Tree) -> Iterator[str]:
    for path, node in state.names.items():
        if node.kind != FILE or state.files[node.key].is_doubtful:
            continue
        content, held = state.files[node.key], found[path].held
        since = list(content.since)
        for one in later:
            if node.key in one.files and one.files[node.key].now is not since[-1]:
                since.append(one.files[node.key].now)
        if not any(_may_be(held, history) for history in (since, *content.instead)):
            expected = "; ".join(" then ".join(map(_brief, h)) for h in (since, *content.instead))
            yield f"{path} holds {_brief(held)}; possible is {expected}"


def _may_be(held: bytes, since: Iterable[bytes]) -> bool:
    """Whether `held` is one of the contents, or made of their sectors with zeros where they grew."""
    states = list(since)
    if held in states:
        return True
    sure = min(map(len, states))
    if not sure <= len(held) <= max(map(len, states)):
        return False
    for at in range(0, len(held), SECTOR_BYTES):
        stop = min(at + SECTOR_BYTES, len(held))
        parts = {one[at:stop].ljust(stop - at, b"\0") for one in states}
        if held[at:stop] not in parts and not _grew_from_zeros(held[at:stop], max(sure - at, 0), parts):
            return False
    return True


def _grew_from_zeros(part: bytes, sure: int, parts: set[bytes]) -> bool:
    return not any(part[sure:]) and (sure <= 0 or any(part[:sure] == one[:sure] for one in parts))


def _brief(held: bytes) -> str:
    return f"{len(held)} B {blake3(held).hexdigest()[:8]}"
