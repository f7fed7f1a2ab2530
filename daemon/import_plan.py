"""Which versions an existing directory becomes, and what of it is new.

One rule: this looks at names, sizes and times only, and decides; nothing is read or written here.

Every checkpoint that the last version lacks, or has otherwise, becomes a version of its own: in the order of
the steps in their names, else of their times. What is no checkpoint (logs, a tokenizer, a tracker) goes along
with the first checkpoint that is not older, else with the last. A version shows the directory as it was then,
as far as one can tell: the checkpoints so far.
"""

from __future__ import annotations

import stat
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptfs.store.formats.file_verdict import TENSOR_SUFFIXES
from ckptfs.store.formats.save_names import is_save_directory, step_of_name
from ckptfs.store.tree import Entry

Path = tuple[bytes, ...]
ReadTree = Callable[[Entry], Sequence[Entry]]
"""The entries of a saved directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One name of a directory outside, as lstat shows it; `children` are there for a directory.

    `is_left`: somebody is at work on it, so it stays as it was in the last version; of a directory that
    says this of the files directly in it, not of what lies deeper. `keeps`: what the last version has in this
    directory, and is not in it any more, has not gone. `links` counts all its names, `names` those that
    were seen.
    """

    name: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    ctime_ns: int
    device: int
    inode: int
    links: int
    names: int = 1
    blocks: int = 0
    rdev: int = 0
    target: bytes | None = None
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    children: tuple[Found, ...] = ()
    is_left: bool = False
    keeps: bool = False

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return stat.S_ISREG(self.mode)


@dataclass(frozen=True, slots=True)
class Step:
    """One version that is to be made: the names (below the directory) that it brings, the time of the newest
    file in them, and the step that the names tell."""

    names: tuple[bytes, ...]
    time_ns: int
    step: int | None


def plan_import(
    top: Found, base: Mapping[bytes, Entry], read_tree: ReadTree, follows: bool = False
) -> tuple[Step, ...]:
    """The versions that `top` becomes, given the entries of the version before (none: empty).

    With `follows` there is one without names if something has gone, and nothing else is new.
    """
    news = [child for child in top.children if is_news(child, base.get(child.name), read_tree)]
    saves, rest = _divided(child for child in news)
    steps = _with_rest(_ordered(saves), sorted((_time_of(one), one.name) for one in rest))
    gone = base.keys() - {child.name for child in top.children}
    if follows and gone and not steps and not top.keeps:
        steps = [Step((), top.mtime_ns, None)]
    return tuple(steps)


def is_news(found: Found, base: Entry | None, read_tree: ReadTree) -> bool:
    """Whether something in `found` differs from what the version before has under its name."""
    if not found.is_dir:
        return not found.is_left and not is_same(found, base)
    if base is None or not base.is_dir:
        return not found.is_left or any(is_news(child, None, read_tree) for child in found.children)
    before = {entry.name: entry for entry in read_tree(base)}
    if any(is_news(child, before.get(child.name), read_tree) for child in found.children):
        return True
    if found.keeps:
        return False
    here = {child.name for child in found.children}
    return bool(before.keys() - here) or not _has_same_attributes(found, base)


def is_same(found: Found, base: Entry | None) -> bool:
    """Whether a file is, by all that lstat shows, still the one that the version has.

    The time of the last change of the inode is a part of that, so that restored times fool nobody.
    """
    if base is None or not _has_same_attributes(found, base) or found.ctime_ns != base.ctime_ns:
        return False
    if found.is_file:
        return found.size == base.size
    return (found.target, found.rdev) == (base.target, base.rdev)


def files_to_take(
    found: Found, base: Entry | None, read_tree: ReadTree, path: tuple[bytes, ...] = ()
) -> Iterator[tuple[tuple[bytes, ...], Found]]:
    """(path, file) of every regular file at or below `found` whose bytes the version before has not."""
    path = (*path, found.name)
    if found.is_file and not found.is_left and not is_same(found, base):
        yield path, found
    before = {entry.name: entry for entry in read_tree(base)} if base is not None and base.is_dir else {}
    for child in found.children:
        yield from files_to_take(child, before.get(child.name), read_tree, path)


def deeper_saves(top: Found) -> bytes | None:
    """The path of the directory that has the checkpoints, or of the first that has, if `top` itself has none
    but lies above: as a folder of runs does."""
    waiting = deque([(b"", top)])
    while waiting:
        path, found = waiting.popleft()
        if any(_is_step_name(child) or _is_tensor_file(child) for child in found.children):
            return path or None
        waiting.extend(
            (path + b"/" + one.name if path else one.name, one) for one in found.children if one.is_dir
        )
    return None


def holds_weights(found: Found) -> bool:
    """Whether a file is a part of a save that is worth nothing half-written; a log may be open for days."""
    return _is_tensor_file(found) or (found.is_file and found.name.endswith(b".distcp"))


def newest_change_ns(top: Found) -> int:
    """The time of the last change of anything in `top`, by the clock of its file system."""
    return max(top.ctime_ns, *map(newest_change_ns, top.children)) if top.children else top.ctime_ns


def changed_since(top: Found, looked_ns: int, base: Mapping[bytes, Entry]) -> Iterator[Path]:
    """The paths of what `top` has of later than a look: files, and directories that the version before has
    not (a rename makes those, and changes nothing in them)."""

    def later(found: Found, path: Path) -> Iterator[Path]:
        if found.ctime_ns > looked_ns and (found.is_file or (len(path) == 1 and found.name not in base)):
            yield path
        for child in found.children:
            yield from later(child, (*path, child.name))

    return later(top, ()) if looked_ns else iter(())


def with_left(top: Found, left: frozenset[tuple[bytes, ...]], *, keeps: bool = False) -> Found:
    """`top` with these paths below it marked as left; () is `top` itself. `keeps`: every directory does."""

    def marked(found: Found, path: tuple[bytes, ...], in_left: bool) -> Found:
        is_left = path in left or (in_left and not found.is_dir)
        children = tuple(marked(child, (*path, child.name), is_left) for child in found.children)
        return replace(found, is_left=is_left, keeps=found.is_dir and (keeps or is_left), children=children)

    return marked(top, (), False) if left or keeps else top


def with_names(top: Found) -> Found:
    """`top` with the number of names that each file has in it."""
    counts = Counter((one.device, one.inode) for one in every_file(top) if one.links > 1)

    def counted(found: Found) -> Found:
        if found.is_dir:
            return replace(found, children=tuple(map(counted, found.children)))
        return replace(found, names=counts.get((found.device, found.inode), 1))

    return counted(top) if any(count > 1 for count in counts.values()) else top


def every_file(found: Found) -> Iterator[Found]:
    """The regular files at and below `found`."""
    if found.is_file:
        yield found
    for child in found.children:
        yield from every_file(child)


def is_empty(found: Found) -> bool:
    """Whether it is a directory with nothing but such directories in it."""
    return found.is_dir and all(map(is_empty, found.children))


def _divided(news: Iterable[Found]) -> tuple[list[Found], list[Found]]:
    saves: list[Found] = []
    rest: list[Found] = []
    for one in news:
        (saves if _is_save(one) else rest).append(one)
    return saves, rest


def _ordered(saves: Sequence[Found]) -> list[Step]:
    """One step for each number, and for each save without one, at the place that its time gives it."""
    numbered: dict[int, list[Found]] = {}
    others: list[Found] = []
    for one in saves:
        step = _step_of(one)
        others.append(one) if step is None else numbered.setdefault(step, []).append(one)
    steps = [Step(_names(some), max(map(_time_of, some)), step) for step, some in sorted(numbered.items())]
    for one in sorted(others, key=lambda other: (_time_of(other), other.name)):
        time_ns = _time_of(one)
        at = next((at for at, step in enumerate(steps) if step.time_ns > time_ns), len(steps))
        steps.insert(at, Step((one.name,), time_ns, None))
    return steps


def _with_rest(steps: list[Step], rest: Sequence[tuple[int, bytes]]) -> list[Step]:
    """`steps` that also bring the names of `rest`, which is in the order of the times: each goes along with
    the first step that is not older, else with the last; without steps all make one."""
    if not steps:
        return [Step(tuple(name for _, name in rest), rest[-1][0], None)] if rest else []
    brought: list[list[bytes]] = [[] for _ in steps]
    at = 0
    for time_ns, name in rest:
        # The times only grow, so a step that was too old for one name is so for the next.
        while at < len(steps) and steps[at].time_ns < time_ns:
            at += 1
        brought[min(at, len(steps) - 1)].append(name)
    pairs = zip(steps, brought, strict=True)
    return [replace(step, names=(*step.names, *names)) if names else step for step, names in pairs]


def _names(some: Iterable[Found]) -> tuple[bytes, ...]:
    return tuple(sorted(one.name for one in some))


def _time_of(found: Found) -> int:
    """When it was saved: the time of its newest file; a directory's own time changes with every copy."""
    return max((one.mtime_ns for one in every_file(found)), default=found.mtime_ns)


def _is_save(found: Found) -> bool:
    """Whether it is a checkpoint: by its name, or a directory that holds tensors."""
    if found.is_dir:
        return _is_step_name(found) or any(_is_tensor_file(one) for one in every_file(found))
    return _is_tensor_file(found) and _step_of(found) is not None


def _is_step_name(found: Found) -> bool:
    name = _text(found)
    return found.is_dir and (is_save_directory(name) or step_of_name(name) is not None)


def _step_of(found: Found) -> int | None:
    return step_of_name(_text(found))


def _is_tensor_file(found: Found) -> bool:
    return found.is_file and _text(found).rpartition(".")[2] in TENSOR_SUFFIXES


def _has_same_attributes(found: Found, base: Entry) -> bool:
    return (found.mode, found.uid, found.gid, found.mtime_ns) == (
        base.mode,
        base.uid,
        base.gid,
        base.mtime_ns,
    )


def _text(found: Found) -> str:
    return found.name.decode("utf-8", "surrogateescape")
