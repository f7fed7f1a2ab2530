"""`export-oms`: a version's manifest for OpenSSF model signing, made by whoever asks for it.

One rule: the user's key is read by the user's own process; a daemon is only asked for digests.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from ckptfs.store.errors import InvalidRequest
from ckptfs.store.model_manifest import model_statement, signed_bundle
from ckptfs.store.signing import ModelKey
from ckptfs.store.version_names import split_version

_ONE_FILE = "."


def exported(answer: Mapping[str, object], inner: str, key_file: str | None) -> bytes:
    """The manifest of what `answer` (to Digest of the place `inner`) lists, in a bundle if there is a key.

    InvalidRequest if a manifest cannot say what is there, or for a bad key; OSError if that cannot be read.
    """
    others = cast("Sequence[str]", answer["others"])
    if others:
        raise InvalidRequest(
            f"{others[0]!r} is no regular file, and a manifest can only name such; export a folder without"
        )
    files = {
        str(one["path"]): str(one["sha256"])
        for one in cast("Sequence[Mapping[str, object]]", answer["files"])
    }
    name = posixpath.basename(split_version(inner)[0].rstrip("/")) or "root"
    if not answer["is_directory"]:
        (digits,) = files.values()
        files = {_ONE_FILE: digits}
    statement = model_statement(name, files)
    return statement if key_file is None else signed_bundle(statement, _key(key_file))


def _key(path: str) -> ModelKey:
    try:
        return ModelKey(Path(path).read_text(encoding="ascii", errors="replace"))
    except InvalidRequest as e:
        raise InvalidRequest(f"{path}: {e}") from None
