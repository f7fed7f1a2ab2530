"""Ed25519: who signs, and how anybody checks it with the public key alone; ECDSA for model manifests.

One rule: a signature is PureEdDSA over bytes that begin with what they are (seal.py), so nothing that
was signed for one purpose passes for another.

Source: RFC 8032; FIPS 186-5 with RFC 6979; keys are PKCS #8 and SubjectPublicKeyInfo in PEM (RFC 8410), as
openssl writes them.
"""

from __future__ import annotations

import hashlib

from Crypto.Hash import SHA256
from Crypto.PublicKey import ECC
from Crypto.Signature import DSS, eddsa

from ckptfs.store.errors import InvalidRequest

KEY_BYTES = 32
SIGNATURE_BYTES = 64
_CURVE = "Ed25519"
_MODEL_CURVE = "NIST P-256"


class PublicKey:
    """A key that signatures are checked with. Equal if its 32 bytes are.

    `fingerprint` is `sha256:` and the SHA-256 of its DER form, as in
    `openssl pkey -pubin -outform DER | sha256sum`.
    """

    __slots__ = ("_key", "_verifier", "fingerprint", "raw")

    def __init__(self, raw: bytes) -> None:
        """InvalidRequest unless `raw` is the 32 bytes of a key."""
        try:
            if len(raw) != KEY_BYTES:
                raise ValueError
            self._key = eddsa.import_public_key(raw)
        except ValueError:
            raise InvalidRequest("that is not an Ed25519 public key of 32 bytes") from None
        self._verifier = eddsa.new(self._key, "rfc8032")
        self.raw = raw
        encoded = self._key.export_key(format="DER")
        assert isinstance(encoded, bytes)
        self.fingerprint = f"sha256:{hashlib.sha256(encoded).hexdigest()}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicKey) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Whether `signature` is this key's over `message`. About 0.25 ms."""
        try:
            self._verifier.verify(message, signature)
        except ValueError:
            return False
        return True

    def pem(self) -> str:
        """The key as a file holds it."""
        return str(self._key.export_key(format="PEM")) + "\n"


class SigningKey:
    """The private half; never leaves the process but in `pem`."""

    __slots__ = ("_key", "_signer", "public")

    def __init__(self, seed: bytes) -> None:
        """The key that 32 secret random bytes stand for."""
        assert len(seed) == KEY_BYTES
        self._key = ECC.construct(curve=_CURVE, seed=seed)
        self._signer = eddsa.new(self._key, "rfc8032")
        self.public = PublicKey(_raw(self._key))

    def sign(self, message: bytes) -> bytes:
        """64 bytes, the same for the same message. About 0.1 ms."""
        return self._signer.sign(message)

    def pem(self) -> str:
        """The key as a file holds it; secret."""
        return str(self._key.export_key(format="PEM")) + "\n"


class ModelKey:
    """A private key on the curve P-256, as signs model manifests: of the user, not of a store."""

    __slots__ = ("_key",)

    def __init__(self, pem: str) -> None:
        """The key in a PEM file; InvalidRequest if that holds no private key on P-256."""
        key = _parsed(pem)
        if key.curve != _MODEL_CURVE or not key.has_private():
            raise InvalidRequest("model manifests are signed with a private key on P-256 (prime256v1)")
        self._key = key

    def sign(self, message: bytes) -> bytes:
        """ECDSA with SHA-256 in DER, the same for the same message."""
        return DSS.new(self._key, "deterministic-rfc6979", encoding="der").sign(SHA256.new(message))

    def public_pem(self) -> str:
        """The public half, as a file holds it."""
        return str(self._key.public_key().export_key(format="PEM")) + "\n"


def signing_key_of(pem: str) -> SigningKey:
    """The private key in a PEM file; InvalidRequest if that holds none."""
    key = _imported(pem)
    if not key.has_private():
        raise InvalidRequest("that is a public key; to sign needs the private one")
    return SigningKey(bytes(key.seed))


def public_key_of(pem: str) -> PublicKey:
    """The public key in a PEM file (of a private key: its public half); InvalidRequest if there is none."""
    return PublicKey(_raw(_imported(pem)))


def _parsed(pem: str) -> ECC.EccKey:
    try:
        return ECC.import_key(pem)
    except (ValueError, IndexError, TypeError):
        raise InvalidRequest(
            "that is not a key file in PEM (BEGIN PRIVATE KEY or BEGIN PUBLIC KEY)"
        ) from None


def _imported(pem: str) -> ECC.EccKey:
    key = _parsed(pem)
    if key.curve != _CURVE:
        raise InvalidRequest(f"that is a key for {key.curve}; ckptfs signs with {_CURVE}")
    return key


def _raw(key: ECC.EccKey) -> bytes:
    encoded = key.public_key().export_key(format="raw")
    assert isinstance(encoded, bytes)
    return encoded
