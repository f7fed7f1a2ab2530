"""What a store consists of: its format file, its folders, its lock.

One rule: what this program does not know it refuses in one line, before it has written a byte.
A store is made by writing `format` last, so a folder without it is either not ours or was never
used; and an unknown flag is never guessed at.

Source: FORMAT.md, "The format file"; the three kinds of flag are those of ext4.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from typing import Literal, cast

import msgspec

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Conflict, InvalidRequest, NotFound, Unsupported
from ckptfs.store.filesystem import check_file_system
from ckptfs.store.hashing import crc64

FORMAT_PATH = "format"
LOCK_PATH = "lock"
FORMAT_VERSION = 1
FOLDERS = ("index", "journal", "staging", "segments", "history", "quarantine")
ENCODED = "encoded"
CONTEXTS = "contexts"
KNOWN_INCOMPAT: frozenset[str] = frozenset({ENCODED, CONTEXTS})
SEALS = "seals"
DIGESTS = "digests"
ROTATIONS = "rotations"
WRITERS = "writers"
HEALTH = "health"
MERGES = "merges"
KNOWN_RO_COMPAT: frozenset[str] = frozenset({SEALS, DIGESTS, ROTATIONS, WRITERS, HEALTH, MERGES})

_KIND = "ckptfs store"
_HARMLESS = {*FOLDERS, LOCK_PATH, FORMAT_PATH + ".tmp", "lost+found"}
_LOCK_TRIES = 10
_LOCK_PAUSE_S = 0.02
_MAX_SMALL_FILE_BYTES = 1 << 16
_MAX_MENDED_FORMAT_BYTES = 1 << 10
_NO_CHECKSUM = b"0" * 16
_CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{16})"')


class Format(msgspec.Struct, frozen=True):
    """What STORE/format says. Unknown `compat` flags are fine, unknown `ro_compat` flags forbid
    writing, unknown `incompat` flags forbid everything."""

    kind: str = _KIND
    version: int = FORMAT_VERSION
    compat: tuple[str, ...] = ()
    ro_compat: tuple[str, ...] = ()
    incompat: tuple[str, ...] = ()


class Holder(msgspec.Struct, frozen=True):
    """Who holds a store: contents of STORE/lock."""

    pid: int
    mountpoint: str = ""
    socket: str = ""


def open_store(path: str, *, create: bool = False, writing: bool = True) -> Disk:
    """The Disk of the store at `path`, after all that can be refused without reading its contents.

    With `create` an absent or empty folder becomes a store. With `writing` the folders of the
    layout are there afterwards (a backup leaves some out). Raises NotFound, InvalidRequest (not a
    store) or Unsupported (a newer store, a network file system); nothing was changed then.
    Durable when: this returned.
    """
    root = os.path.abspath(path)
    if not os.path.isdir(root):
        if os.path.lexists(root):
            raise InvalidRequest(f"the store {root} is not a folder")
        if not create:
            raise NotFound(f"there is no store at {root}")
    check_file_system(root)
    disk = Disk(root)
    if not disk.exists(FORMAT_PATH):
        if not create:
            raise NotFound(f"there is no store at {root} (no format file)")
        _check_unused(disk)
        disk.make_dir("")
    else:
        check_format(read_format(disk), writing=writing)
    if writing:
        _make_folders(disk)
    return disk


def _check_unused(disk: Disk) -> None:
    """InvalidRequest unless the folder is empty, or was left by a creation that died."""
    strange = [name for name in disk.list_dir("") if name not in _HARMLESS]
    filled = [name for name in FOLDERS if disk.list_dir(name)]
    if filled:
        raise InvalidRequest(f"{disk.root} looks like a store without its format file; copy it back first")
    if strange:
        raise InvalidRequest(f"{disk.root} is not empty and no store ({strange[0]!r} is in it)")


def _make_folders(disk: Disk) -> None:
    missing = [folder for folder in FOLDERS if not disk.exists(folder)]
    for folder in missing:
        disk.make_dir(folder)
    # A process that was killed may have made names and not synced them: what is there counts from now on.
    for folder in (*FOLDERS, ""):
        disk.sync_dir(folder)
    if not disk.exists(FORMAT_PATH):
        disk.write_file(FORMAT_PATH, encode_format(Format()))
        disk.sync_dir("..")


def encode_format(form: Format) -> bytes:
    """The bytes of the format file: one line of JSON that ends with its checksum."""
    return _with_checksum(cast("dict[str, object]", msgspec.to_builtins(form)))


def _with_checksum(fields: dict[str, object]) -> bytes:
    others = {key: value for key, value in fields.items() if key != "checksum"}
    blank = msgspec.json.encode(others)[:-1] + b',"checksum":"%s"}\n' % _NO_CHECKSUM
    return blank.replace(_NO_CHECKSUM, b"%016x" % crc64(blank))


def read_format(disk: Disk) -> Format:
    """What the format file says, one flipped bit put right; InvalidRequest if it is not one."""
    form = decode_format(_read_small(disk, FORMAT_PATH))
    if form is None:
        raise InvalidRequest(f"{disk.absolute(FORMAT_PATH)} is not the format file of a ckptfs store")
    return form


def mend_format(disk: Disk) -> str | None:
    """Write the format file again if a bit of it has flipped; what was wrong, or None. Durable when:
    this returned."""
    encoded = _read_small(disk, FORMAT_PATH)
    if _has_right_checksum(encoded) or (right := _mended_format(encoded)) is None:
        return None
    disk.write_file(FORMAT_PATH, right)
    return "a bit of the format file was flipped"


def decode_format(encoded: bytes) -> Format | None:
    """The format in a file's bytes; None if they are none, even with any one of their bits flipped.

    A file without a checksum is one of before there was any. Never raises.
    """
    if not _has_right_checksum(encoded):
        encoded = _mended_format(encoded) or (b"" if b'"checksum"' in encoded else encoded)
    try:
        form = msgspec.json.decode(encoded, type=Format)
    except msgspec.DecodeError:
        return None
    return form if form.kind == _KIND else None


def _has_right_checksum(encoded: bytes) -> bool:
    found = _CHECKSUM.search(encoded)
    if found is None:
        return False
    blank = encoded[: found.start(1)] + _NO_CHECKSUM + encoded[found.end(1) :]
    return int(found[1], 16) == crc64(blank)


def _mended_format(encoded: bytes) -> bytes | None:
    """The file before one of its bits flipped; None if that does not explain it."""
    if len(encoded) > _MAX_MENDED_FORMAT_BYTES:
        return None
    candidates = (_with_flip(encoded, bit) for bit in range(8 * len(encoded)))
    return next((one for one in candidates if _has_right_checksum(one)), None)


def _with_flip(encoded: bytes, bit: int) -> bytes:
    flipped = bytearray(encoded)
    flipped[bit >> 3] ^= 1 << (bit & 7)
    return bytes(flipped)


def check_format(form: Format, *, writing: bool) -> None:
    """Unsupported if this program must not touch (or, with `writing`, not change) such a store."""
    if form.version != FORMAT_VERSION:
        raise Unsupported(f"the store has format {form.version}; that needs a newer ckptfs")
    if unknown := sorted(set(form.incompat) - KNOWN_INCOMPAT):
        raise Unsupported(f"the store uses {', '.join(unknown)}; that needs a newer ckptfs")
    unknown = sorted(set(form.ro_compat) - KNOWN_RO_COMPAT)
    if unknown and writing:
        raise Unsupported(
            f"the store uses {', '.join(unknown)}; to write to it needs a newer ckptfs, to read it does not"
        )


def add_ro_compat(disk: Disk, flag: str) -> None:
    """Keep programs that do not know `flag` from writing to this store; nothing if they are kept already.

    The caller holds the lock. Durable when: this returned.
    """
    _add_flag(disk, "ro_compat", flag)


def add_incompat(disk: Disk, flag: str) -> None:
    """Keep programs that do not know `flag` from opening this store at all; otherwise as add_ro_compat."""
    _add_flag(disk, "incompat", flag)


def _add_flag(disk: Disk, kind: Literal["ro_compat", "incompat"], flag: str) -> None:
    form = read_format(disk)
    known: tuple[str, ...] = getattr(form, kind)
    if flag in known:
        return
    # Keys that this program does not know stay.
    encoded = _read_small(disk, FORMAT_PATH)
    right = encoded if _has_right_checksum(encoded) else _mended_format(encoded) or encoded
    fields: dict[str, object] = msgspec.json.decode(right)
    fields[kind] = [*known, flag]
    disk.write_file(FORMAT_PATH, _with_checksum(fields))


def _read_small(disk: Disk, path: str) -> bytes:
    fd = disk.open_read(path)
    try:
        return disk.pread(fd, _MAX_SMALL_FILE_BYTES, 0)
    finally:
        disk.close(fd)


# The lock


class StoreLock:
    """One daemon per store: an flock on STORE/lock, held as long as this object's descriptor is open.

    The kernel drops it when the process dies. A forked child inherits the descriptor, so a
    worker process must be started by exec, or close it. Owned by the task that made it.
    """

    def __init__(self, disk: Disk, holder: Holder) -> None:
        """Take the lock, or raise Conflict that names the process that has it."""
        self._disk = disk
        self._fd = _open_lock(disk)
        if not _try_lock(self._fd):
            disk.close(self._fd)
            raise Conflict(f"the store {disk.root} is in use by {_described(_read_holder(disk))}")
        self.describe(holder)

    def describe(self, holder: Holder) -> None:
        """Write down who holds the lock, if there is room. Not synced: it says nothing after a reboot."""
        encoded = msgspec.json.encode(holder) + b"\n"
        try:
            self._disk.truncate(self._fd, 0)
            self._disk.pwrite(self._fd, encoded, 0)
        except OSError:
            pass  # for messages only: a full disk must not keep a daemon from starting

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                self._disk.truncate(fd, 0)
            except OSError:
                pass  # as in `describe`
            finally:
                self._disk.close(fd)


def holder_of(disk: Disk) -> Holder | None:
    """Who has the store in use now, for commands that ask a running daemon; None: nobody.

    Holds a shared lock for a moment, which is why StoreLock tries more than once.
    """
    try:
        fd = disk.open_read(LOCK_PATH)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(disk)
    finally:
        disk.close(fd)
    return None


def _open_lock(disk: Disk) -> int:
    try:
        return disk.create(LOCK_PATH)
    except FileExistsError:
        return disk.open_write(LOCK_PATH)


def _try_lock(fd: int) -> bool:
    for attempt in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if attempt + 1 < _LOCK_TRIES:
                time.sleep(_LOCK_PAUSE_S)
    return False


def _read_holder(disk: Disk) -> Holder:
    try:
        return msgspec.json.decode(_read_small(disk, LOCK_PATH), type=Holder)
    except msgspec.DecodeError:
        return Holder(0)


def _described(holder: Holder) -> str:
    process = f"process {holder.pid}" if holder.pid else "another process"
    return process + (f", mounted at {holder.mountpoint}" if holder.mountpoint else "")
