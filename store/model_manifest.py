"""A model manifest as OpenSSF model signing (OMS 1.0) has it, and the bundle that signs one. Pure.

One rule: what is stated are the SHA-256 of whole files, so whoever has `model-signing` and a copy of the
files checks it without ckptfs.

Source: https://github.com/ossf/model-signing-spec; in-toto Statement v1; DSSE 1.0; Sigstore bundle 0.3.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping

from ckptfs.store.errors import InvalidRequest
from ckptfs.store.signing import ModelKey

PREDICATE_TYPE = "https://model_signing/signature/v1.0"
_STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
# What verifiers leave out unless they are told otherwise.
_IGNORED = (".git", ".gitattributes", ".github", ".gitignore")


def model_statement(name: str, files: Mapping[str, str]) -> bytes:
    """The statement, as JSON, about a model: `files` are paths below it ("." if it is one file) with their
    SHA-256 in hex. InvalidRequest if a path or the name cannot be written."""
    shown = sorted((path, digits) for path, digits in files.items() if path.split("/")[0] not in _IGNORED)
    for text in (name, *(path for path, _ in shown)):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRequest(f"the name {text!r} is not UTF-8; a manifest cannot hold it") from None
    digest = hashlib.sha256(b"".join(bytes.fromhex(digits) for _, digits in shown))
    predicate = {
        "serialization": {
            "method": "files",
            "hash_type": "sha256",
            "allow_symlinks": False,
            "ignore_paths": list(_IGNORED),
        },
        "resources": [{"name": path, "algorithm": "sha256", "digest": digits} for path, digits in shown],
    }
    statement = {
        "_type": _STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest.hexdigest()}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate,
    }
    return json.dumps(statement, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def signed_bundle(statement: bytes, key: ModelKey) -> bytes:
    """The Sigstore bundle, as JSON, that holds a statement and its signature."""
    hint = hashlib.sha256(key.public_pem().encode("ascii")).hexdigest()
    bundle = {
        "mediaType": _BUNDLE_TYPE,
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": _base64(statement),
            "payloadType": _PAYLOAD_TYPE,
            "signatures": [{"sig": _base64(key.sign(_authenticated(statement))), "keyid": ""}],
        },
    }
    return json.dumps(bundle, separators=(",", ":")).encode("ascii")


def _authenticated(payload: bytes) -> bytes:
    """What DSSE signs: its "pre-authentication encoding" of the payload."""
    return f"DSSEv1 {len(_PAYLOAD_TYPE)} {_PAYLOAD_TYPE} {len(payload)} ".encode("ascii") + payload


def _base64(encoded: bytes) -> str:
    return base64.b64encode(encoded).decode("ascii")
