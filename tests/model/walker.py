"""Random operations on a mount and on a plain directory beside it, compared one by one.

The one rule: what is done depends on the seed and on the plain directory only, so a run can be repeated; what
ckptfs does behind it (ingest, publish) falls in between as it likes.
"""

from __future__ import annotations

import os
import random
import stat
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

from mounting import Mount
from sides import LARGE_BYTES, Side
from small_store import safetensors

REMEMBERED = 60
SLOTS = 6
DEPTH = 3
_DIRECTORIES = ("a", "b", "c")
_FILES = ("f", "g", "h", "model.safetensors", "run.log", "latest")
_FLAGS = (
    os.O_RDONLY,
    os.O_RDWR,
    os.O_RDWR | os.O_CREAT,
    os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    os.O_RDWR | os.O_CREAT | os.O_EXCL,
    os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    os.O_RDWR | os.O_TRUNC,
    os.O_RDONLY | os.O_NOFOLLOW,
)
# None climbs out of the two roots: beside them lies the same file system on one side, another on the other.
_TARGETS = ("f", "a/../g", "a/b", "nowhere")
_XATTRS = ("user.one", "user.two", "trusted.three")


class Difference(AssertionError):
    """The two sides did not answer the same."""


class Walker:
    """Both sides, and what was done last."""

    def __init__(self, mount: Mount, plain: Path, rng: random.Random) -> None:
        self._mount = mount
        self.mounted = Side(mount.path)
        self.plain = Side(plain)
        self._rng = rng
        self._blocks = [rng.randbytes(4096) for _ in range(6)]
        self._recent: deque[str] = deque(maxlen=REMEMBERED)
        self.counts: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self._tags = 0

    def run(self, steps: int, deadline_s: float | None = None) -> int:
        """Do `steps` operations, fewer if `deadline_s` comes first; returns how many."""
        names = list(STEPS)
        weights = [STEPS[name][0] for name in names]
        for number in range(steps):
            name = self._rng.choices(names, weights)[0]
            self.counts[name] += 1
            self._recent.append(f"{number} {name}")
            STEPS[name][1](self)
            if number % 200 == 199:
                self.compare_trees()
            if deadline_s is not None and time.monotonic() > deadline_s:
                return number
        return steps

    def finish(self) -> None:
        self.plain.close_all()
        self.mounted.close_all()
        self.compare_trees()

    def compare_trees(self) -> None:
        """Everything that is there is the same on both sides."""
        plain, mounted = self.plain.tree(), self.mounted.tree()
        for path in sorted(plain.keys() | mounted.keys()):
            if plain.get(path) != mounted.get(path):
                raise self._difference(f"{path} in the tree", plain.get(path), mounted.get(path))

    def both(self, operation: str, *arguments: object) -> object:
        """Ask both sides the same; the answer, if it is one."""
        self._recent[-1] += f"; {operation}{tuple(_short(a) for a in arguments)}"
        expected = self.plain.ask(operation, *arguments)
        found = self.mounted.ask(operation, *arguments)
        self._recent[-1] += f" = {_short(expected)}"
        if isinstance(expected, str) and expected.startswith("E"):
            self.outcomes[f"{operation} {expected}"] += 1
        if expected != found:
            raise self._difference(operation, expected, found)
        return expected

    # -- what the steps choose from -----------------------------------------------------------

    def path(self, names: tuple[str, ...] = _DIRECTORIES + _FILES) -> str:
        """Some path, that may or may not be there."""
        if self._rng.random() < 0.6:
            known = self._known()
            if known:
                return self._rng.choice(known)
        folders = [self._rng.choice(_DIRECTORIES) for _ in range(self._rng.randrange(DEPTH))]
        return "/".join([*folders, self._rng.choice(names)])

    def file_path(self) -> str:
        """A path that is a regular file, if there is one."""
        known = [path for path in self._known() if self._is(path, stat.S_ISREG)]
        return self._rng.choice(known) if known and self._rng.random() < 0.85 else self.path(_FILES)

    def slot(self) -> int | None:
        return self._rng.choice(sorted(self.plain.slots)) if self.plain.slots else None

    def payload(self) -> bytes:
        length = self._rng.choice((0, 1, self._rng.randrange(200), self._rng.randrange(9000), 4096, 150_000))
        if self._rng.random() < 0.4:
            return (self._rng.choice(self._blocks) * (length // 4096 + 1))[:length]
        return self._rng.randbytes(length)

    def tensors(self) -> bytes:
        """A file that the kernel reads by itself once it is stored; some are saved again and again."""
        number = self._rng.choice((1, 2, self._rng.randrange(1 << 30)))
        return safetensors({"w": random.Random(number).randbytes(LARGE_BYTES + (number % 3 << 16))})

    def is_large(self, path: str) -> bool:
        """Whether who reads a file keeps what he opened: then it is not opened to be read later."""
        try:
            return os.stat(self.plain._at(path)).st_size >= LARGE_BYTES
        except OSError:
            return False

    def offset(self) -> int:
        return self._rng.choice((0, self._rng.randrange(10_000), 4096 * self._rng.randrange(60)))

    # -- the daemon ---------------------------------------------------------------------------

    def publish(self) -> None:
        """A version of some top directory, now."""
        tops = [path for path in self._known() if "/" not in path and self._is(path, stat.S_ISDIR)]
        if not tops:
            return
        self._tags += 1
        try:
            os.mkdir(self._mount.path / self._rng.choice(tops) / ".versions" / f"t{self._tags}")
        except FileNotFoundError:
            pass  # nothing of it can be published yet

    def let_ingest(self) -> None:
        """Every descriptor closed for longer than the settle time."""
        self._close_all()
        time.sleep(self._mount.settle_s * 2 + 0.3)

    def restart(self) -> None:
        """The daemon ends in order; descriptors are opened again after it."""
        again = self._close_all()
        self._mount.stop()
        self._mount.restart()
        self._open_again(again)

    def kill(self) -> None:
        """kill -9 with everything open. What was answered is there afterwards."""
        again = [(slot, path, flags) for slot, (_, path, flags) in self.plain.slots.items()]
        self._mount.kill9()
        self.plain.close_all()
        for slot in list(self.mounted.slots):
            try:
                self.mounted.close(slot)
            except OSError:
                pass  # ENOTCONN: the descriptor is gone all the same
        self._mount.restart()
        self._open_again(again)
        self.compare_trees()

    def _close_all(self) -> list[tuple[int, str, int]]:
        again = [(slot, path, flags) for slot, (_, path, flags) in self.plain.slots.items()]
        self.plain.close_all()
        self.mounted.close_all()
        return again

    def _open_again(self, again: list[tuple[int, str, int]]) -> None:
        for slot, path, flags in again:
            self.both("open", slot, path, flags & (os.O_ACCMODE | os.O_APPEND), 0)

    def _known(self) -> list[str]:
        paths = []
        for folder, names in self.plain._walk():
            paths += [f"{folder}/{name}".lstrip("/") for name in names]
        return sorted(paths)

    def _is(self, path: str, kind: Callable[[int], bool]) -> bool:
        return kind(os.lstat(self.plain._at(path)).st_mode)

    def _difference(self, what: str, expected: object, found: object) -> Difference:
        story = "\n".join(self._recent)
        answers = f"plain {_short(expected, 500)}, ckptfs {_short(found, 500)}"
        said = f"{what}: {answers}{_first_byte(expected, found)}"
        return Difference(f"{said}\nlast steps:\n{story}\n{self._mount.log_tail()}")


def _short(value: object, limit: int = 60) -> str:
    text = (
        f"<{len(value)} bytes {value[:8]!r}>" if isinstance(value, bytes) and len(value) > 40 else repr(value)
    )
    return text if len(text) <= limit else text[:limit] + "…"


def _first_byte(expected: object, found: object) -> str:
    if isinstance(expected, tuple) and isinstance(found, tuple):
        return "".join(_first_byte(a, b) for a, b in zip(expected, found, strict=False))
    if not isinstance(expected, bytes) or not isinstance(found, bytes) or expected == found:
        return ""
    pairs = zip(expected, found, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    return f"; {len(expected)} and {len(found)} bytes, first difference at {at}"


def _on_slot(operation: str, choose: Callable[[Walker], tuple[object, ...]]) -> Callable[[Walker], None]:
    def step(walker: Walker) -> None:
        slot = walker.slot()
        if slot is not None:
            walker.both(operation, slot, *choose(walker))

    return step


def _open(walker: Walker) -> None:
    free = [slot for slot in range(SLOTS) if slot not in walker.plain.slots]
    if not free:
        walker.both("close", walker._rng.choice(sorted(walker.plain.slots)))
        return
    flags = walker._rng.choice(_FLAGS)
    path = walker.file_path() if not flags & os.O_EXCL else walker.path(_FILES)
    if flags & os.O_ACCMODE == os.O_RDONLY and walker.is_large(path):
        flags |= os.O_RDWR
    walker.both("open", free[0], path, flags, walker._rng.choice((0o644, 0o600, 0o4755)))


def _copy_range(walker: Walker) -> None:
    source, target = walker.slot(), walker.slot()
    if source is not None and source != target:
        length = walker._rng.randrange(50_000)
        walker.both("copy_range", source, target, length, walker.offset(), walker.offset())


def _read_back(walker: Walker) -> None:
    path = walker.file_path()
    walker.both("read_whole", path)
    walker.both("stat", path)


def _change_under_reader(walker: Walker) -> None:
    """Mostly of what was just stored."""
    if walker._rng.random() < 0.5:
        walker.let_ingest()
    large = [path for path in walker._known() if walker.is_large(path)]
    path = walker._rng.choice(large) if large else walker.file_path()
    for _ in range(walker._rng.randrange(1, 4)):
        walker.both("read_whole", path)
        walker.both("stat", path)
    walker.both("change_under_reader", path, walker.offset(), walker.payload(), walker._rng.random() < 0.2)
    walker.both("stat", path)


def _mode(walker: Walker) -> int:
    return walker._rng.choice((0o755, 0o644, 0o700, 0o4711, 0o2755, 0o1777, 0o000))


Step = Callable[[Walker], object]
STEPS: dict[str, tuple[float, Step]] = {
    "open": (12, _open),
    "close": (4, _on_slot("close", lambda w: ())),
    "pread": (6, _on_slot("pread", lambda w: (w._rng.randrange(20_000), w.offset()))),
    "pwrite": (10, _on_slot("pwrite", lambda w: (w.payload(), w.offset()))),
    "read": (3, _on_slot("read", lambda w: (w._rng.randrange(20_000),))),
    "write": (6, _on_slot("write", lambda w: (w.payload(),))),
    "seek": (2, _on_slot("seek", lambda w: (w.offset(), w._rng.choice((0, 1, 2))))),
    "ftruncate": (3, _on_slot("ftruncate", lambda w: (w.offset(),))),
    "fstat": (3, _on_slot("fstat", lambda w: ())),
    "fchmod": (1, _on_slot("fchmod", lambda w: (_mode(w),))),
    "fsync": (2, _on_slot("fsync", lambda w: ())),
    "map read": (3, _on_slot("map_read", lambda w: (w.offset(), w._rng.randrange(20_000)))),
    "map write": (3, _on_slot("map_write", lambda w: (w.offset(), w.payload()))),
    "copy range": (2, _copy_range),
    "write whole": (6, lambda w: w.both("write_whole", w.path(_FILES), w.payload())),
    "replace whole": (4, lambda w: w.both("replace_whole", w.path(_FILES), w.payload())),
    "read whole": (5, _read_back),
    "save tensors": (2, lambda w: w.both("write_whole", w.path(_FILES), w.tensors())),
    "change under reader": (2, _change_under_reader),
    "truncate": (4, lambda w: w.both("truncate", w.file_path(), w.offset())),
    "mkdir": (7, lambda w: w.both("mkdir", w.path(_DIRECTORIES), _mode(w) | 0o700)),
    "rmdir": (3, lambda w: w.both("rmdir", w.path())),
    "unlink": (5, lambda w: w.both("unlink", w.path())),
    "remove tree": (0.5, lambda w: w.both("remove_tree", w.path(_DIRECTORIES))),
    "rename": (8, lambda w: w.both("rename", w.path(), w.path(), 0)),
    "rename new": (2, lambda w: w.both("rename", w.path(), w.path(), 1)),
    "exchange": (3, lambda w: w.both("rename", w.path(), w.path(), 2)),
    "link": (4, lambda w: w.both("link", w.path(), w.path())),
    "symlink": (3, lambda w: w.both("symlink", w._rng.choice(_TARGETS), w.path())),
    "readlink": (1, lambda w: w.both("readlink", w.path())),
    "mknod": (1, lambda w: w.both("mknod", w.path(), w._rng.choice((0o010600, 0o140600, 0o100644)))),
    "list": (2, lambda w: w.both("listing", w.path(_DIRECTORIES))),
    "stat": (3, lambda w: w.both("stat", w.path())),
    "chmod": (3, lambda w: w.both("chmod", w.path(), _mode(w))),
    "chown": (2, lambda w: w.both("chown", w.path(), w._rng.randrange(3), w._rng.randrange(3))),
    "utime": (3, lambda w: w.both("utime", w.path(), 10**9, w._rng.randrange(1, 10**14))),
    "setxattr": (
        3,
        lambda w: w.both(
            "setxattr", w.path(), w._rng.choice(_XATTRS), w.payload()[:200], w._rng.choice((0, 0, 1, 2))
        ),
    ),
    "removexattr": (1, lambda w: w.both("removexattr", w.path(), w._rng.choice(_XATTRS))),
    "xattrs": (2, lambda w: w.both("xattrs", w.path())),
    "publish": (1.5, Walker.publish),
    "let ingest": (0.6, Walker.let_ingest),
    "restart": (0.1, Walker.restart),
    "kill": (0.3, Walker.kill),
}
