"""What a destructive call was about to take away: a file pinned by reference.

One rule: a pin copies and hashes nothing. It names the staging file or recipe that held the
bytes, and nobody writes to or removes that place until a publish has made the pre-image.

Table PREIMAGE: unit's top directory u64be ‖ number u64be -> PinnedFile. Source: FORMAT.md.
"""

from __future__ import annotations

import msgspec

from ckptfs.store.errors import Corrupt
from ckptfs.store.inode import Inode


class PinnedDirectory(msgspec.Struct, frozen=True, array_like=True):
    """A directory on the way to a pinned file, as it was."""

    name: bytes
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ctime_ns: int


class PinnedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file as it was: `name` in `directories` (outermost first, below the unit's top).

    `inode` has size, times and content as they were at the call.
    """

    ino: int
    directories: tuple[PinnedDirectory, ...]
    name: bytes
    inode: Inode
    xattrs: tuple[tuple[bytes, bytes], ...]


_decoder = msgspec.msgpack.Decoder(PinnedFile)


def encode_pin(pin: PinnedFile) -> bytes:
    """Packed bytes of a pin."""
    return msgspec.msgpack.encode(pin)


def decode_pin(encoded: bytes) -> PinnedFile:
    """The pin in `encoded`, or Corrupt."""
    try:
        return _decoder.decode(encoded)
    except msgspec.DecodeError as e:
        raise Corrupt(f"not a pinned file: {e}") from None
