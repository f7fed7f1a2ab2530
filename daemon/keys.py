"""The key that versions are signed with: where it lies, and how it is made at first use.

One rule: a key that is there and cannot be used stops the start. A gap of unsigned versions can never be
closed afterwards, so versions are left unsigned only where the configuration says so.

The private key is PKCS #8 in PEM, 0600; its public half lies beside it, for everybody to check with.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from pathlib import Path

from ckptfs.daemon.key_repair import mend_key
from ckptfs.store.errors import CkptfsError, InvalidRequest, NotPermitted, Unavailable
from ckptfs.store.signing import KEY_BYTES, PublicKey, SigningKey, public_key_of, signing_key_of

log = logging.getLogger(__name__)
UNSIGNED = "none"
ROOT_KEYS = "/etc/ckptfs/keys"
_NAME = "signing.pem"
_HINT = 'set `key` in the configuration to a file elsewhere, or to "none" to leave versions unsigned'


def default_key_path() -> str:
    """Where the key lies if the configuration names no place."""
    if os.geteuid() == 0:
        return f"{ROOT_KEYS}/{_NAME}"
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return f"{folder}/ckptfs/keys/{_NAME}"


def public_path(path: str) -> str:
    """Where the public half of the key in `path` lies."""
    return f"{path.removesuffix('.pem')}.pub"


def load_or_make_key(setting: str) -> SigningKey | None:
    """The key that the configuration's `key` means; made if there is none. None for "none".

    Raises NotPermitted, InvalidRequest or Unavailable, each with what to do. Durable when: this returned.
    """
    if setting == UNSIGNED:
        return None
    path = setting or default_key_path()
    try:
        if not os.path.lexists(path):
            _make(path)
        mend_key(path, public_path(path))
        key = _load(path)
    except OSError as e:
        raise Unavailable(f"cannot use the signing key {path}: {e.strerror}; {_HINT}") from None
    _offer_public(path, key)
    return key


def known_public_key() -> PublicKey | None:
    """The public key in the default place, for a store that no daemon has; None: there is none."""
    for path in (public_path(default_key_path()), default_key_path()):
        try:
            return read_public_key(path)
        except (CkptfsError, OSError):
            continue
    return None


def read_public_key(path: str) -> PublicKey:
    """The public key in a file; InvalidRequest if there is none in it, OSError if it cannot be read."""
    try:
        return public_key_of(Path(path).read_text(encoding="ascii", errors="replace"))
    except InvalidRequest as e:
        raise InvalidRequest(f"{path}: {e}") from None


def _load(path: str) -> SigningKey:
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise InvalidRequest(f"the signing key {path} is not a file; {_HINT}")
    if mode & 0o077:
        raise NotPermitted(f"the signing key {path} is open to others; chmod 600 it, or take a new one")
    text = Path(path).read_text(encoding="ascii", errors="replace")
    try:
        return signing_key_of(text)
    except InvalidRequest as e:
        raise InvalidRequest(f"cannot use the signing key {path}: {e}; {_HINT}") from None


def _make(path: str) -> None:
    """A new key at `path`, whole or not at all; of two who make it at once the first wins."""
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    key = SigningKey(secrets.token_bytes(KEY_BYTES))
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    _write(temporary, key.pem(), 0o600)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    finally:
        os.unlink(temporary)
    _sync_folder(folder)
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
            _write(place, text, 0o644)
        elif Path(place).read_text(encoding="ascii", errors="replace") != text:
            log.warning("%s is not the public half of %s", place, path)
    except OSError as e:
        log.info("the public key was not written to %s: %s", place, e.strerror)


def _write(path: str, text: str, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.write(fd, text.encode("ascii"))
        os.fchmod(fd, mode)
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
