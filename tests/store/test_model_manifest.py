"""model_manifest: what OpenSSF model signing expects, byte for byte, and signatures that openssl accepts.

The one rule: `model-signing` itself (it brings 35 packages) is not needed: the golden bundles were accepted
by its version 1.1.1, and every other bundle is checked as the specification says.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from golden import vectors

from ckptfs.store.errors import InvalidRequest
from ckptfs.store.model_manifest import model_statement, signed_bundle
from ckptfs.store.signing import ModelKey, SigningKey

PEM = vectors("model_manifest")[0]["key"]
FILES = {
    "b/model.bin": hashlib.sha256(b"model").hexdigest(),
    "b.txt": hashlib.sha256(b"text").hexdigest(),
    "é": hashlib.sha256(b"").hexdigest(),
    ".gitignore": hashlib.sha256(b"left out").hexdigest(),
    ".git/config": hashlib.sha256(b"left out too").hexdigest(),
    "b/.gitignore": hashlib.sha256(b"not left out").hexdigest(),
}


def statement_in(bundle: bytes) -> tuple[dict[str, Any], bytes, bytes]:
    """(the statement, what DSSE signs, the signature) of a bundle."""
    envelope = json.loads(bundle)["dsseEnvelope"]
    payload, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"]
    (signature,) = envelope["signatures"]
    signed = b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)
    return json.loads(payload), signed, base64.b64decode(signature["sig"])


@pytest.mark.parametrize("vector", vectors("model_manifest"), ids=lambda v: v["name"])
def test_golden_bundles(vector: dict[str, Any]) -> None:
    statement = model_statement(vector["model"], vector["files"])
    assert signed_bundle(statement, ModelKey(vector["key"])).decode() == vector["bundle"]


def test_a_statement_says_what_verifiers_compare() -> None:
    statement = json.loads(model_statement("m", FILES))
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://model_signing/signature/v1.0"
    resources = statement["predicate"]["resources"]
    assert [one["name"] for one in resources] == ["b.txt", "b/.gitignore", "b/model.bin", "é"]
    assert all(
        one == {"name": one["name"], "algorithm": "sha256", "digest": FILES[one["name"]]} for one in resources
    )
    (subject,) = statement["subject"]
    joined = b"".join(bytes.fromhex(one["digest"]) for one in resources)
    assert subject == {"name": "m", "digest": {"sha256": hashlib.sha256(joined).hexdigest()}}
    serialization = statement["predicate"]["serialization"]
    assert (serialization["method"], serialization["hash_type"]) == ("files", "sha256")
    assert serialization["allow_symlinks"] is False and ".gitignore" in serialization["ignore_paths"]


def test_openssl_accepts_the_signature(tmp_path: Path) -> None:
    key = ModelKey(PEM)
    bundle = signed_bundle(model_statement("m", FILES), key)
    _, signed, signature = statement_in(bundle)
    (tmp_path / "key.pub").write_text(key.public_pem())
    (tmp_path / "sig").write_bytes(signature)
    command = [
        "openssl",
        "dgst",
        "-sha256",
        "-verify",
        str(tmp_path / "key.pub"),
        "-signature",
        str(tmp_path / "sig"),
    ]
    assert subprocess.run(command, input=signed, capture_output=True, check=False).returncode == 0
    assert subprocess.run(command, input=signed + b" ", capture_output=True, check=False).returncode == 1
    hint = json.loads(bundle)["verificationMaterial"]["publicKey"]["hint"]
    shown = subprocess.run(
        ["openssl", "pkey", "-pubout"], input=PEM, capture_output=True, text=True, check=True
    )
    assert shown.stdout == key.public_pem() and hint == hashlib.sha256(shown.stdout.encode()).hexdigest()


def test_what_is_no_p256_key_is_refused() -> None:
    for text in ("", "key", SigningKey(bytes(32)).pem(), ModelKey(PEM).public_pem()):
        with pytest.raises(InvalidRequest) as caught:
            ModelKey(text)
        assert "\n" not in str(caught.value)


def test_names_that_json_cannot_hold_are_refused() -> None:
    for name, files in (("\udc80", FILES), ("m", {"a\udcff": "00" * 32})):
        with pytest.raises(InvalidRequest, match="UTF-8"):
            model_statement(name, files)
