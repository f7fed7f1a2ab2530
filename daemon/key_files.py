"""Key files: where the parts of a key lie, and how they are read and written.

One rule: a file of a key is written whole and synced, or not at all.

The private key is PKCS #8 in PEM, 0600; its public half lies beside it, for everybody to check with.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from ckptfs.store.errors import InvalidRequest, NotPermitted
from ckptfs.store.signing import PublicKey, SigningKey, public_key_of, signing_key_of

HINT = 'set `key` in the configuration to a file elsewhere, or to "none" to leave versions unsigned'


def stem_of(path: str) -> str:
    """The path of a key without its ending."""
    return path.removesuffix(".pem")


def public_path(path: str) -> str:
    """Where the public half of the key in `path` lies."""
    return f"{stem_of(path)}.pub"


def load_key(path: str) -> SigningKey:
    """The private key in a file. InvalidRequest if it is none, NotPermitted if others can read it."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise InvalidRequest(f"the signing key {path} is not a file; {HINT}")
    if mode & 0o077:
        raise NotPermitted(f"the signing key {path} is open to others; chmod 600 it, or take a new one")
    text = Path(path).read_text(encoding="ascii", errors="replace")
    try:
        return signing_key_of(text)
    except InvalidRequest as e:
        raise InvalidRequest(f"cannot use the signing key {path}: {e}; {HINT}") from None


def read_public_key(path: str) -> PublicKey:
    """The public key in a file; InvalidRequest if there is none in it, OSError if it cannot be read."""
    try:
        return public_key_of(Path(path).read_text(encoding="ascii", errors="replace"))
    except InvalidRequest as e:
        raise InvalidRequest(f"{path}: {e}") from None


def write_new(path: str, text: str, mode: int) -> None:
    """A new file; FileExistsError if there is one. Its bytes are durable when: this returned."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.write(fd, text.encode("ascii"))
        os.fchmod(fd, mode)
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: str, text: str, mode: int) -> None:
    """A file with this content, in the place of what is there. Its bytes are durable when: this returned."""
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    write_new(temporary, text, mode)
    os.rename(temporary, path)


def sync_folder(path: str) -> None:
    """Names in a folder are durable when: this returned."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
