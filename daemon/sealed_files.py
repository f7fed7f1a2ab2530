"""Checking a file against its seal, with nothing but the public key.

One rule: no store and no daemon are asked, so it works wherever the file went.

Source: FORMAT.md, "Seals of files".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptfs.daemon.keys import known_keyring, read_public_key
from ckptfs.daemon.messages import Progress
from ckptfs.store.digests import FileDigests, digests_of
from ckptfs.store.errors import InvalidRequest, NotFound
from ckptfs.store.file_seal import Judgement, decode_file_seal, judge_file
from ckptfs.store.hashing import WholeHash
from ckptfs.store.signing import PublicKey

_READ_BYTES = 4 << 20
_MOST_SEAL_BYTES = 1 << 10
Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found, in a sentence; `keys` are the fingerprints that the seal was tried with."""

    is_good: bool
    said: str
    keys: tuple[str, ...]


def check_sealed(file: str, seal: str, key_files: Sequence[str], on_progress: Report | None) -> Checked:
    """Whether `file` is what the seal in the file `seal` was made for, by a key in `key_files` (none: the one
    in the usual place). InvalidRequest, NotFound or OSError: it cannot be told."""
    keys = _keys(key_files)
    with open(seal, "rb") as opened:
        try:
            encoded = decode_file_seal(opened.read(_MOST_SEAL_BYTES))
        except InvalidRequest as e:
            raise InvalidRequest(f"{seal}: {e}") from None
    digests = _digests_of_file(file, on_progress)
    prints = tuple(key.fingerprint for key in keys)
    signer = next((key for key in keys if judge_file(encoded, digests, [key]) is Judgement.GOOD), None)
    if signer is not None:
        return Checked(True, f"good, sealed by {signer.fingerprint}", prints)
    return Checked(False, judge_file(encoded, digests, keys).value, prints)


def _keys(files: Sequence[str]) -> list[PublicKey]:
    if files:
        return [read_public_key(file) for file in files]
    known = known_keyring().trusted
    if not known:
        raise NotFound("no public key is known here; name one with --key (`ckptfs keys show` prints it)")
    return known


def _digests_of_file(path: str, on_progress: Report | None) -> FileDigests:
    whole = WholeHash()
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        while payload := file.read(_READ_BYTES):
            whole.update(payload)
            if on_progress is not None:
                on_progress(Progress(done=whole.size, total=size))
    return digests_of(whole)
