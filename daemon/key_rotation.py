"""A new signing key in the place of an old one, such that a crash at any step leaves a key that works.

One rule: what the old key says of the new one is on the disk before the new key signs anything.

Order: 1 the new key, `NAME.next.pem`; 2 the old public key, `NAME.<8 hex digits>.pub`; 3 `NAME.rotations`
with one more line, signed by the old key (the commit point); 4 `NAME.next.pem` is renamed over
`NAME.pem`, which destroys the old private key; 5 `NAME.pub` is the new one. Died before 3: the new key is
thrown away at the next start. Behind 3: the next start does 4 and 5.

Source: FORMAT.md, "Rotation".
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ckptfs.daemon.key_files import load_key, public_path, replace_file, stem_of, sync_folder, write_new
from ckptfs.store.errors import Conflict, Corrupt, InvalidRequest
from ckptfs.store.keyring import Rotation, decode_rotation, make_rotation
from ckptfs.store.signing import KEY_BYTES, PublicKey, SigningKey

log = logging.getLogger(__name__)
_MOST_BYTES = 1 << 20
_MOST_MENDED_BYTES = 1 << 12


def rotations_path(path: str) -> str:
    """Where the rotations that led to the key in `path` are listed."""
    return f"{stem_of(path)}.rotations"


def read_rotations(path: str) -> tuple[Rotation, ...]:
    """The rotations that led to the key in `path`, oldest first; one flipped bit in their file is put right.
    InvalidRequest if it is damaged otherwise, OSError if it cannot be read."""
    place = rotations_path(path)
    try:
        with open(place, "rb") as file:
            encoded = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return ()
    found = _decoded(encoded)
    if found is not None:
        return found
    found = next((one for flipped in _with_one_flip(encoded) if (one := _decoded(flipped)) is not None), None)
    if found is None:
        raise InvalidRequest(f"{place} is damaged or forged; put a copy of it back")
    log.error("a bit of %s was flipped", place)
    return found


def finish_rotation(path: str) -> None:
    """Do what is left of a rotation that a crash has interrupted, so that the key in `path` is the right one.
    Conflict while somebody rotates it. Durable when: this returned."""
    if os.path.lexists(_next_path(path)):
        with _locked(path):
            _finish(path)


def check_not_retired(path: str, key: SigningKey, rotations: Sequence[Rotation]) -> None:
    """InvalidRequest if the key in `path` was replaced by another: an old copy of it was put back."""
    if any(one.old == key.public.raw for one in rotations) and rotations[-1].new != key.public.raw:
        newest = PublicKey(rotations[-1].new).fingerprint
        raise InvalidRequest(f"the signing key {path} was retired; put back the one with {newest}")


def show_public(path: str, key: SigningKey, rotations: Sequence[Rotation]) -> None:
    """Step 5. A public half that is none of ours is left alone; what cannot be written is no error."""
    try:
        shown = Path(public_path(path)).read_text(encoding="ascii", errors="replace")
        if shown in {PublicKey(one.old).pem() for one in rotations} - {key.public.pem()}:
            replace_file(public_path(path), key.public.pem(), 0o644)
    except FileNotFoundError:
        pass  # It is made when the key is used.
    except OSError as e:
        log.info("the public key was not written to %s: %s", public_path(path), e.strerror)


def rotate_key(path: str, now_ns: int) -> SigningKey:
    """Put a new key in the place of the one in `path`; returns it. Conflict while somebody else does so.

    InvalidRequest, NotPermitted or OSError: the old key is still in use. Durable when: this returned.
    """
    with _locked(path):
        _finish(path)
        old, rotations = load_key(path), read_rotations(path)
        check_not_retired(path, old, rotations)
        new = SigningKey(secrets.token_bytes(KEY_BYTES))
        write_new(_next_path(path), new.pem(), 0o600)
        _give_to_owner(_next_path(path), path)
        name = old.public.fingerprint.partition(":")[2][:8]
        replace_file(f"{stem_of(path)}.{name}.pub", old.public.pem(), 0o644)
        sync_folder(os.path.dirname(path))
        rotations = (*rotations, make_rotation(old, new.public, now_ns))
        replace_file(rotations_path(path), _lines(rotations), 0o644)
        sync_folder(os.path.dirname(path))
        _finish(path)
        show_public(path, new, rotations)
    log.warning("the signing key was rotated from %s to %s", old.public.fingerprint, new.public.fingerprint)
    return new


def _decoded(encoded: bytes) -> tuple[Rotation, ...] | None:
    try:
        lines = encoded.splitlines()
        found = tuple(decode_rotation(bytes.fromhex(str(json.loads(line)["record"]))) for line in lines)
    except (ValueError, KeyError, TypeError, RecursionError, Corrupt):
        return None
    return found if all(rotation.is_signed() for rotation in found) else None


def _with_one_flip(encoded: bytes) -> Iterator[bytes]:
    if len(encoded) <= _MOST_MENDED_BYTES:
        for at in range(len(encoded)):
            for bit in range(8):
                yield encoded[:at] + bytes([encoded[at] ^ 1 << bit]) + encoded[at + 1 :]


def _give_to_owner(path: str, like: str) -> None:
    """Root may rotate the key of a user, who is to read it afterwards."""
    owner = os.stat(like)
    if os.geteuid() == 0:
        os.chown(path, owner.st_uid, owner.st_gid)


def _finish(path: str) -> None:
    """Step 4, or back to where nothing was decided."""
    following = _next_path(path)
    if not os.path.lexists(following):
        return
    rotations = read_rotations(path)
    decided = {rotations[-1].new} if rotations else set()
    try:
        is_decided = load_key(following).public.raw in decided
    except InvalidRequest:
        is_decided = False  # A part of a file: it was being written.
    if is_decided:
        os.rename(following, path)
    else:
        os.unlink(following)
    sync_folder(os.path.dirname(path))


def _lines(rotations: Sequence[Rotation]) -> str:
    """One line of JSON each: the record, and for people the keys."""
    shown = (
        {
            "old": PublicKey(one.old).fingerprint,
            "new": PublicKey(one.new).fingerprint,
            "time_ns": one.time_ns,
            "record": one.encode().hex(),
        }
        for one in rotations
    )
    return "".join(json.dumps(one) + "\n" for one in shown)


def _next_path(path: str) -> str:
    return f"{stem_of(path)}.next.pem"


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """One rotation at a time."""
    fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise Conflict(f"the signing key {path} is being rotated by another process; try again") from None
    finally:
        os.close(fd)
