"""The key that versions are signed with: where it lies, and how it is made at first use.

One rule: a key that is there and cannot be used stops the start. A gap of unsigned versions can never be
closed afterwards, so versions are left unsigned only where the configuration says so.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from ckptfs.daemon.key_files import HINT, load_key, public_path, read_public_key, sync_folder, write_new
from ckptfs.daemon.key_repair import mend_key
from ckptfs.daemon.key_rotation import (
    check_not_retired,
    finish_rotation,
    read_rotations,
    rotations_path,
    show_public,
)
from ckptfs.store.errors import CkptfsError, Unavailable
from ckptfs.store.keyring import Keyring, Rotation
from ckptfs.store.signing import KEY_BYTES, PublicKey, SigningKey

__all__ = ["known_public_key", "load_or_make_key", "public_path", "read_public_key"]

log = logging.getLogger(__name__)
UNSIGNED = "none"
ROOT_KEYS = "/etc/ckptfs/keys"
_NAME = "signing.pem"


def default_key_path() -> str:
    """Where the key lies if the configuration names no place."""
    if os.geteuid() == 0:
        return f"{ROOT_KEYS}/{_NAME}"
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return f"{folder}/ckptfs/keys/{_NAME}"


def key_path(setting: str) -> str | None:
    """The file that the configuration's `key` means; None for "none"."""
    return None if setting == UNSIGNED else setting or default_key_path()


def load_or_make_key(setting: str) -> SigningKey | None:
    """The key that the configuration's `key` means; made if there is none. None for "none".

    A rotation that a crash has interrupted is finished. Raises NotPermitted, InvalidRequest or Unavailable,
    each with what to do. Durable when: this returned.
    """
    path = key_path(setting)
    if path is None:
        return None
    try:
        if not os.path.lexists(path):
            _make(path)
        finish_rotation(path)
        mend_key(path, public_path(path))
        key, rotations = load_key(path), read_rotations(path)
    except OSError as e:
        raise Unavailable(f"cannot use the signing key {path}: {e.strerror}; {HINT}") from None
    check_not_retired(path, key, rotations)
    show_public(path, key, rotations)
    _offer_public(path, key)
    return key


def load_keyring(setting: str) -> Keyring:
    """The same with the keys before it. Raises as load_or_make_key."""
    key, path = load_or_make_key(setting), key_path(setting)
    try:
        return Keyring(key, () if path is None else read_rotations(path))
    except OSError as e:
        raise Unavailable(f"cannot read {rotations_path(path or '')}: {e.strerror}") from None


def known_keyring(setting: str = "") -> Keyring:
    """The public keys in the place that the configuration's `key` means, for a store that no daemon has;
    empty if there are none."""
    path = key_path(setting)
    return (
        Keyring() if path is None else Keyring(rotations=_known_rotations(path), public=_known_public(path))
    )


def readable_keyring(setting: str = "") -> Keyring:
    """The same with the private key, if whoever asks may read it. Nothing is made, finished or mended."""
    path = key_path(setting)
    if path is None:
        return Keyring()
    try:
        key, rotations = load_key(path), read_rotations(path)
        check_not_retired(path, key, rotations)
    except (CkptfsError, OSError):
        return known_keyring(setting)
    return Keyring(key, rotations)


def known_public_key() -> PublicKey | None:
    """The public key in the default place; None: there is none."""
    return _known_public(default_key_path())


def _known_public(path: str) -> PublicKey | None:
    for place in (public_path(path), path):
        try:
            return read_public_key(place)
        except (CkptfsError, OSError):
            continue
    return None


def _known_rotations(path: str) -> tuple[Rotation, ...]:
    try:
        return read_rotations(path)
    except (CkptfsError, OSError):
        return ()


def _make(path: str) -> None:
    """A new key at `path`, whole or not at all; of two who make it at once the first wins."""
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    key = SigningKey(secrets.token_bytes(KEY_BYTES))
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    write_new(temporary, key.pem(), 0o600)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    finally:
        os.unlink(temporary)
    sync_folder(folder)
    log.warning(
        "a new signing key was made: %s (%s); keep a copy of %s elsewhere",
        path,
        key.public.fingerprint,
        public_path(path),
    )


def _offer_public(path: str, key: SigningKey) -> None:
    """The public half beside the key. Without it everything works, so a folder that is closed is no error."""
    place, text = public_path(path), key.public.pem()
    try:
        if not os.path.lexists(place):
            write_new(place, text, 0o644)
        elif Path(place).read_text(encoding="ascii", errors="replace") != text:
            log.warning("%s is not the public half of %s", place, path)
    except OSError as e:
        log.info("the public key was not written to %s: %s", place, e.strerror)
