"""The record of a live inode, as it stands in the index.

One rule: a record says where a file's bytes are, and that place is never written again except
through the staging file that it names.

Source: FORMAT.md, "Live tree".
"""

from __future__ import annotations

import stat

import msgspec

from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import RecipeId

ROOT_INO = 1


class Content(msgspec.Struct, frozen=True, array_like=True):
    """Where the bytes of a regular file are.

    - `staging` 0: they are what `base` says (None: the file is empty).
    - `staging` > 0, `base` None: they are the staging file of that number, all of it.
    - `staging` > 0 and `base`: an overlay. Blocks of 4 KiB that are allocated in the staging file
      come from it, holes below `base_limit` come from `base`, other holes are zeros.

    `synced`: the staging file was fdatasynced, so it is to be trusted after a power cut.
    `fallback`: the last durable content, which the name goes back to if it is not.
    """

    staging: int = 0
    base: RecipeId | None = None
    base_limit: int = 0
    synced: bool = False
    fallback: RecipeId | None = None


EMPTY_CONTENT = Content()


class Inode(msgspec.Struct, frozen=True, array_like=True):
    """One inode. `mode` is the full st_mode, times are ns since the epoch.

    `links` are the (parent inode, name) pairs under which it is found: one for a directory, any
    number for the rest, none once it is unlinked but still open. `size`, `blocks` (512 B units)
    and the times are those of the last moment at which no staging file was there; while one is,
    size, mtime and blocks come from its fstat. `subdirs` counts directories in a directory.
    `root` is the Merkle file root of `content.base` while there is no staging file.
    """

    mode: int
    uid: int
    gid: int
    links: tuple[tuple[int, bytes], ...]
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    size: int = 0
    blocks: int = 0
    rdev: int = 0
    subdirs: int = 0
    content: Content = EMPTY_CONTENT
    root: bytes | None = None
    target: bytes | None = None
    versions_off: bool = False

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return stat.S_ISREG(self.mode)

    @property
    def nlink(self) -> int:
        """What st_nlink shows."""
        if self.is_dir:
            return 2 + self.subdirs if self.links else 0
        return len(self.links)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Inode)


def encode_inode(inode: Inode) -> bytes:
    """Packed bytes of a record."""
    return _encoder.encode(inode)


def decode_inode(encoded: bytes) -> Inode:
    """The record in `encoded`, or Corrupt."""
    try:
        return _decoder.decode(encoded)
    except msgspec.DecodeError as e:
        raise Corrupt(f"not an inode record: {e}") from None


def durable_recipe(inode: Inode) -> RecipeId | None:
    """The recipe that holds the last durable content of a file; None: nothing, or a staging file.

    It is what another staging file that takes its place goes back to after a power cut.
    """
    content = inode.content
    if content.staging and content.synced:
        return None  # what was stored before its last sync is older than that
    return content.fallback if content.staging else content.base
