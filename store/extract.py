"""Write out any version of a ckptfs store, with nothing but Python 3.8 or later.

    python extract.py STORE list
    python extract.py STORE UNIT@VERSION DEST

VERSION is a number, a name, a tag, `latest` or `latest-complete`. One rule: this file imports
nothing of ckptfs and reads only `format`, `segments/` and `history/`, so it is an independent
reader of what FORMAT.md specifies, and works on a copy of these three. With the `blake3` package every
byte is verified; without it only record checksums are. Encoded chunks need `extract_codecs.py` beside it.
Memory: about 300 bytes a stored chunk. Exit status 0: all written; 1: not; 2: bad usage.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

try:
    from blake3 import blake3
except ImportError:
    blake3 = None  # type: ignore[assignment,misc]

FRAME = struct.Struct("<4sBBHIQ")
IDX_HEADER = struct.Struct("<4sHBBQQQII")
IDX_ROW, RECIPE_HEADER, CRC = struct.Struct("<32sQIIBBH"), struct.Struct("<4sHHQQ"), struct.Struct("<Q")
sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # where extract_codecs.py is
UNIT, VERSION, TAG, UNTAG, FORGET, RENAME = 1, 2, 3, 4, 7, 8


class Damaged(Exception):
    """Something cannot be read; the message says what."""


def _crc_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [byte >> 1 ^ (0x9A6C9329AC4BC9B5 if byte & 1 else 0) for byte in table]
    return table


_SAME_IN_HARD_LINKS = ("link", "recipe", "mode", "uid", "gid", "mtime", "ctime")
_TABLE = _crc_table()


def crc64(encoded: bytes) -> int:
    """CRC-64/NVME; about 10 MB/s."""
    crc, table = (1 << 64) - 1, _TABLE
    for byte in encoded:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFFFFFFFFFF


def cbor(encoded: bytes) -> Any:
    """The DAG-CBOR item in `encoded`; a CID becomes its 32-byte digest."""
    try:
        value, end = _item(encoded, 0, 0)
    except (IndexError, TypeError, UnicodeDecodeError) as e:
        raise Damaged(f"not CBOR: {e}") from None
    if end != len(encoded):
        raise Damaged("bytes behind a CBOR item")
    return value


def _item(b: bytes, at: int, depth: int) -> tuple[Any, int]:
    major, low = b[at] >> 5, b[at] & 31
    at += 1
    if major == 7 and low in (20, 21, 22):
        return {20: False, 21: True, 22: None}[low], at
    if low > 27 or major == 7 or depth > 70:
        raise Damaged("CBOR of a kind that ckptfs does not write")
    size = 0 if low < 24 else 1 << (low - 24)
    number = int.from_bytes(b[at : at + size], "big") if size else low
    at += size
    if major in (0, 1):
        return (number if major == 0 else -1 - number), at
    if major in (2, 3):
        part = b[at : at + number]
        if len(part) != number:
            raise Damaged("a CBOR string ends early")
        return (part if major == 2 else part.decode("utf-8")), at + number
    if major == 6:
        value, at = _item(b, at, depth + 1)
        return value[5:], at
    items = []
    for _ in range(number * (major - 3)):
        value, at = _item(b, at, depth + 1)
        items.append(value)
    return (items if major == 4 else {items[i]: items[i + 1] for i in range(0, len(items), 2)}), at


class History:
    """One unit: its name, its versions (number → record), its tags (name → number)."""

    def __init__(self, path: str) -> None:
        self.identity = os.path.basename(path)[:-4]
        self.name = self.identity
        self.versions: dict[int, dict[str, Any]] = {}
        self.tags: dict[str, int] = {}
        with open(path, "rb") as f:
            for kind, payload in frames(f.read()):
                self._take(kind, cbor(payload))

    def _take(self, kind: int, record: dict[str, Any]) -> None:
        if kind in (UNIT, RENAME):
            self.name = os.fsdecode(record["name"])
        elif kind == VERSION:
            self.versions[record["number"]] = record
        elif kind == TAG:
            self.tags[record["name"]] = record["number"]
        elif kind == UNTAG:
            self.tags.pop(record["name"], None)
        elif kind == FORGET:
            self.versions.pop(record["number"], None)
            self.tags = {tag: n for tag, n in self.tags.items() if n != record["number"]}

    def find(self, text: str) -> dict[str, Any]:
        """The version that `text` means; Damaged with a clear line if there is none."""
        numbers = sorted(self.versions)
        if text == "latest-complete":
            numbers = [n for n in numbers if self.versions[n]["state"] == "complete"]
        if text in ("latest", "latest-complete") and numbers:
            return self.versions[numbers[-1]]
        wanted = int(text) if text.isdigit() else self.tags.get(text)
        for record in self.versions.values():
            if record["number"] == wanted or record["name"] == text:
                return record
        raise Damaged(f"{self.name} has no version {text!r}; it has {numbers or 'none'}")


def frames(encoded: bytes) -> Iterator[tuple[int, bytes]]:
    """(kind, payload) of every whole frame; what is damaged between them is passed over."""
    at = last = 0
    while 0 <= at <= len(encoded) - FRAME.size - CRC.size:
        magic, version, kind, _, length, sequence = FRAME.unpack_from(encoded, at)
        end = at + FRAME.size + length
        whole = magic == b"CKFR" and version == 1 and end + CRC.size <= len(encoded) and sequence > last
        if whole and crc64(encoded[at:end]) == CRC.unpack_from(encoded, end)[0]:
            yield kind, encoded[at + FRAME.size : end]
            at, last = end + CRC.size, sequence
        else:
            at = encoded.find(b"CKFR", at + 1)


class Place(NamedTuple):
    """Where a payload lies."""

    path: str
    offset: int
    stored: int
    length: int
    codec: int


class Store:
    """A bare store, opened for reading."""

    def __init__(self, root: str, warn: Callable[[str], None]) -> None:
        self.root, self.warn = root, warn
        self.places: dict[bytes, Place] = {}
        self.others: dict[bytes, list[Place]] = {}
        self._check_format()

    def _check_format(self) -> None:
        try:
            with open(os.path.join(self.root, "format"), "rb") as f:
                form = json.load(f)
            kind, version, incompat = form["kind"], form["version"], form["incompat"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise Damaged(f"{self.root} is not a ckptfs store: {e}") from None
        if kind != "ckptfs store" or version != 1 or set(incompat) - {"encoded", "contexts"}:
            raise Damaged(f"the store needs a newer extract.py: format {version}, {incompat}")

    def histories(self) -> list[History]:
        """Every unit, by name."""
        folder = os.path.join(self.root, "history")
        found = []
        for name in sorted(os.listdir(folder)):
            try:
                if name.endswith(".log"):
                    found.append(History(os.path.join(folder, name)))
            except (Damaged, KeyError, TypeError) as e:
                self.warn(f"history/{name}: {e}")
        return sorted(found, key=lambda history: history.name)

    def load_segments(self) -> None:
        """Read every .idx: where each chunk lies."""
        for folder, _, names in sorted(os.walk(os.path.join(self.root, "segments"))):
            for path in sorted(os.path.join(folder, name) for name in names if name.endswith(".idx")):
                try:
                    self._load_idx(path)
                except Damaged as e:
                    self.warn(f"{path}: {e}")

    def _load_idx(self, path: str) -> None:
        with open(path, "rb") as f:
            encoded = f.read()
        if len(encoded) < IDX_HEADER.size + CRC.size:
            raise Damaged("too short")
        magic, version, _, _, _, _, _, inline, count = IDX_HEADER.unpack_from(encoded)
        start = IDX_HEADER.size + inline
        end = start + count * IDX_ROW.size
        if magic != b"CKIX" or version not in (1, 2) or len(encoded) < end + CRC.size:
            raise Damaged("not an .idx of version 1 or 2")
        if crc64(encoded[: -CRC.size]) != CRC.unpack_from(encoded, len(encoded) - CRC.size)[0]:
            raise Damaged("its checksum is wrong")
        for chunk, offset, stored, length, codec, flags, _ in IDX_ROW.iter_unpack(encoded[start:end]):
            place = Place(path if flags & 1 else path[:-4] + ".seg", offset, stored, length, codec)
            if chunk in self.places:
                self.others.setdefault(chunk, []).append(place)
            else:
                self.places[chunk] = place

    def read(self, chunk: bytes, depth: int = 9) -> bytes:
        """A chunk's bytes, from the first of its places where they are right."""
        why = f"chunk {chunk.hex()} is missing"
        for place in [self.places.get(chunk), *self.others.get(chunk, [])]:
            if place is None:
                continue
            payload = self._bytes_at(place)
            if place.codec != 0:
                try:
                    import extract_codecs  # type: ignore[import-not-found]

                    payload = extract_codecs.decode(payload, place.codec, place.length, depth, self.read)
                except (Damaged, ImportError, LookupError, ValueError, struct.error) as e:
                    why = f"chunk {chunk.hex()} in {place.path} at byte {place.offset}: {e}"
                    continue
            if len(payload) == place.length and (blake3 is None or blake3(payload).digest() == chunk):
                return payload
            why = f"chunk {chunk.hex()} is damaged in {place.path} at byte {place.offset}"
        raise Damaged(why)

    def _bytes_at(self, place: Place) -> bytes:
        try:
            with open(place.path, "rb") as f:
                f.seek(place.offset)
                return f.read(place.stored)
        except OSError:
            return b""

    def entries(self, tree: bytes) -> list[dict[str, Any]]:
        """The entries of a directory."""
        found = cbor(self.read(tree))["entries"]
        for entry in found:
            if entry["name"] in (b"", b".", b"..") or b"/" in entry["name"] or b"\0" in entry["name"]:
                raise Damaged(f"an impossible name {entry['name']!r}")
        return list(found)

    def pieces(self, recipe: bytes) -> tuple[int, list[tuple[int, bytes]]]:
        """(size, list of (length, chunk id; zeros for a hole)) of a file."""
        encoded = self.read(recipe)
        magic, version, _, size, count = RECIPE_HEADER.unpack_from(encoded)
        if magic != b"CKRC" or version != 1 or len(encoded) != RECIPE_HEADER.size + 40 * count:
            raise Damaged("not a recipe of version 1")
        rows = encoded[RECIPE_HEADER.size :]
        return size, [(length, chunk) for length, chunk in struct.iter_unpack("<Q32s", rows)]


class Writer:
    """Writes trees below a destination; goes on after damage and counts it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.failed = 0
        self.files = 0
        self._links: dict[tuple[Any, ...], bytes] = {}

    def directory(self, entry: dict[str, Any], path: bytes) -> None:
        """Make `path` (which may exist, empty) what a directory's entry says."""
        os.makedirs(path, exist_ok=True)
        try:
            for child in self.store.entries(entry["tree"]):
                self._child(child, os.path.join(path, child["name"]))
        except (Damaged, KeyError, TypeError, struct.error) as e:
            self._fail(path, e)
        self._attributes(entry, path)

    def _child(self, entry: dict[str, Any], path: bytes) -> None:
        mode = entry["mode"]
        link = tuple(map(entry.get, _SAME_IN_HARD_LINKS)) if entry.get("link") else None
        try:
            if stat.S_ISDIR(mode):
                self.directory(entry, path)
                return
            if link and link in self._links:
                os.link(self._links[link], path, follow_symlinks=False)
                return
            if stat.S_ISREG(mode):
                self._file(entry, path)
            elif stat.S_ISLNK(mode):
                os.symlink(entry["target"], path)
            else:
                os.mknod(path, mode, entry.get("rdev", 0))
            if link:
                self._links[link] = path
            self._attributes(entry, path)
        except (Damaged, OSError, KeyError, TypeError, struct.error) as e:
            self._fail(path, e)

    def _file(self, entry: dict[str, Any], path: bytes) -> None:
        size, pieces = self.store.pieces(entry["recipe"])
        try:
            with open(path, "xb") as f:
                for length, chunk in pieces:
                    if chunk == bytes(32):
                        f.seek(length, os.SEEK_CUR)
                        continue
                    payload = self.store.read(chunk)
                    if len(payload) != length:
                        raise Damaged(f"chunk {chunk.hex()} has another length than its recipe says")
                    f.write(payload)
                f.truncate(size)
        except Damaged:
            os.unlink(path)
            raise
        self.files += 1

    def _attributes(self, entry: dict[str, Any], path: bytes) -> None:
        is_link = stat.S_ISLNK(entry["mode"])
        steps: list[Callable[[], object]] = []
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            steps.append(lambda: os.chown(path, entry["uid"], entry["gid"], follow_symlinks=False))
        if not is_link:
            steps.append(lambda: os.chmod(path, stat.S_IMODE(entry["mode"])))
        for name, value in entry.get("xattrs", []):
            steps.append(lambda n=name, v=value: os.setxattr(path, n, v, follow_symlinks=False))  # type: ignore[misc]
        times = (entry["mtime"], entry["mtime"])
        steps.append(lambda: os.utime(path, ns=times, follow_symlinks=False))
        for step in steps:
            try:
                step()
            except OSError as e:
                self.store.warn(f"{os.fsdecode(path)}: an attribute could not be set: {e.strerror}")

    def _fail(self, path: bytes, why: Exception) -> None:
        self.failed += 1
        self.store.warn(f"{os.fsdecode(path)}: {why}")


def show(histories: list[History]) -> None:
    """Print every version of every unit."""
    for history in histories:
        print(f"{history.name}  (unit {history.identity})")
        for number in sorted(history.versions):
            record = history.versions[number]
            tags = "".join(f" {tag}" for tag, n in sorted(history.tags.items()) if n == number)
            step = "" if record["step"] is None else f" step {record['step']}"
            facts = f"{record['files']} files, {record['bytes']} bytes"
            print(f"  {number:6d}  {record['name']}  {record['state']}{step}  {facts}{tags}")


def chosen(histories: list[History], text: str) -> tuple[History, dict[str, Any]]:
    """The unit and version that UNIT@VERSION means."""
    name, _, version = text.rpartition("@")
    name = name.strip("/")
    found = [h for h in histories if name in (h.name, h.identity)]
    if len(found) != 1:
        problem = "several units are called" if found else "there is no unit"
        raise Damaged(f"{problem} {name!r}; `list` shows them (the unit's id works too)")
    return found[0], found[0].find(version)


def extract(store: Store, text: str, destination: str) -> int:
    """Write UNIT@VERSION to `destination`, which must not exist or be empty."""
    _, record = chosen(store.histories(), text)
    if os.path.lexists(destination) and (not os.path.isdir(destination) or os.listdir(destination)):
        raise Damaged(f"{destination} exists and is not an empty folder")
    store.load_segments()
    writer = Writer(store)
    writer.directory(record["top"], os.fsencode(destination))
    how = "verified" if blake3 is not None else "NOT verified: the blake3 package is not installed"
    print(f"{text}: {writer.files} files written, {writer.failed} failed, {how}")
    return 1 if writer.failed else 0


def main(arguments: list[str]) -> int:
    """The command line."""
    if len(arguments) not in (2, 3) or (len(arguments) == 2) != (arguments[1] == "list"):
        print((__doc__ or "").split("\n\n")[1], file=sys.stderr)
        return 2
    try:
        store = Store(arguments[0], lambda line: print(f"extract: {line}", file=sys.stderr))
        if len(arguments) == 2:
            show(store.histories())
            return 0
        return extract(store, arguments[1], arguments[2])
    except (Damaged, OSError) as e:
        print(f"extract: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
