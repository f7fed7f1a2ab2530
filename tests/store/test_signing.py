"""signing: signatures are those of RFC 8032, key files those of openssl."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from golden import vectors

from ckptfs.store.errors import InvalidRequest
from ckptfs.store.signing import PublicKey, SigningKey, public_key_of, signing_key_of

ZERO_PEM = """-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA
-----END PRIVATE KEY-----
"""
P256_PUBLIC = """-----BEGIN PUBLIC KEY-----
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEaxfR8uEsQkf4vOblY6RA8ncDfYEt
6zOg9KE5RdiYwpZP40Li/hp/m47n60p8D54WK84zV2sxXs7LtkBoN79R9Q==
-----END PUBLIC KEY-----
"""


@pytest.mark.parametrize("vector", vectors("signing"), ids=lambda v: v["name"])
def test_golden_signatures(vector: dict[str, Any]) -> None:
    key = SigningKey(bytes.fromhex(vector["seed"]))
    message, signature = bytes.fromhex(vector["message"]), bytes.fromhex(vector["signature"])
    assert key.public.raw.hex() == vector["public"]
    assert key.public.fingerprint == vector["fingerprint"]
    assert key.sign(message) == signature
    assert PublicKey(key.public.raw).has_signed(message, signature)
    assert not key.public.has_signed(message + b"\0", signature)
    assert not key.public.has_signed(message, signature[:-1] + bytes([signature[-1] ^ 1]))
    assert not key.public.has_signed(message, signature[:-1])


def test_key_files_come_back_as_they_were() -> None:
    key = signing_key_of(ZERO_PEM)
    assert key.pem() == ZERO_PEM and key.public == SigningKey(bytes(32)).public
    assert public_key_of(key.public.pem()) == key.public == public_key_of(ZERO_PEM)
    assert len({key.public, public_key_of(ZERO_PEM), SigningKey(b"x" * 32).public}) == 2


@pytest.mark.parametrize("text", ["", "key", ZERO_PEM[:60], ZERO_PEM.replace("AAAA", "A"), P256_PUBLIC])
def test_what_is_no_key_file_is_one_clear_line(text: str) -> None:
    for read in (signing_key_of, public_key_of):
        with pytest.raises(InvalidRequest) as caught:
            read(text)
        assert "\n" not in str(caught.value)
    with pytest.raises(InvalidRequest, match="public key"):
        signing_key_of(SigningKey(bytes(32)).public.pem())
    with pytest.raises(InvalidRequest):
        PublicKey(bytes(31))


def test_openssl_reads_the_key_files() -> None:
    key = SigningKey(bytes(range(32)))
    show = subprocess.run(
        ["openssl", "pkey", "-pubout"], input=key.pem(), capture_output=True, text=True, check=True
    )
    assert show.stdout == key.public.pem()
