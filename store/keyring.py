"""The keys of those who seal: the one in use, those before it, and how one became the other. Pure.

One rule: a key is followed by another only on the word of the one before, signed; so who knows an old
public key needs nobody to tell him the new one.

Source: FORMAT.md, "Seals", "Rotation".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from ckptfs.store.dagcbor import encode_node
from ckptfs.store.errors import Corrupt, InvalidRequest
from ckptfs.store.history import checked_map
from ckptfs.store.signing import KEY_BYTES, SIGNATURE_BYTES, PublicKey, SigningKey

_CONTEXT = b"ckptfs key rotation 1\0"
_FIELDS: dict[str, tuple[type, ...]] = {
    "new": (bytes,),
    "old": (bytes,),
    "time": (int,),
    "signature": (bytes,),
}
_TIMES = range(1 << 63)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The key `old` says that from `time_ns` on `new` signs in its place (raw public keys). It is also the
    payload of a ROTATE frame."""

    old: bytes
    new: bytes
    time_ns: int
    signature: bytes

    def encode(self) -> bytes:
        """Canonical bytes."""
        return encode_node(
            {"new": self.new, "old": self.old, "time": self.time_ns, "signature": self.signature}
        )

    def is_signed(self) -> bool:
        """Whether the old key has said so."""
        try:
            return PublicKey(self.old).has_signed(_signed(self.old, self.new, self.time_ns), self.signature)
        except InvalidRequest:
            return False


def make_rotation(old: SigningKey, new: PublicKey, time_ns: int) -> Rotation:
    """What the old key signs when it is replaced."""
    signature = old.sign(_signed(old.public.raw, new.raw, time_ns))
    return Rotation(old.public.raw, new.raw, time_ns, signature)


def decode_rotation(encoded: bytes) -> Rotation:
    """The record in `encoded`, or Corrupt. The signature is not verified yet."""
    node = checked_map(encoded, _FIELDS, "rotation record")
    old, new, signature = (cast(bytes, node[field]) for field in ("old", "new", "signature"))
    time_ns = cast(int, node["time"])
    if (len(old), len(new), len(signature)) != (KEY_BYTES, KEY_BYTES, SIGNATURE_BYTES):
        raise Corrupt("a rotation record has a field of the wrong length")
    if time_ns not in _TIMES or old == new:
        raise Corrupt("a rotation record has a time out of range, or one key twice")
    return Rotation(old, new, time_ns, signature)


class Keyring:
    """Belongs to the index thread; whoever signs or checks asks it each time, so a new key is everybody's
    at once. `signing` seals, None: nothing is sealed, or the key is another's. `rotations`: oldest first.
    """

    __slots__ = ("_public", "rotations", "signing")

    def __init__(
        self,
        signing: SigningKey | None = None,
        rotations: Sequence[Rotation] = (),
        *,
        public: PublicKey | None = None,
    ) -> None:
        """`public` is the key that is trusted where there is no private one to sign with."""
        self.signing = signing
        self.rotations = tuple(rotations)
        self._public = public

    @property
    def public(self) -> PublicKey | None:
        """The public half of the key in use, as far as it is known."""
        return self._public if self.signing is None else self.signing.public

    @property
    def retired(self) -> list[PublicKey]:
        """The keys that the one in use has replaced, oldest first."""
        if self.public is None:
            return []
        olds = {one.old for one in self.rotations if self.way_from(one.old)}
        return [PublicKey(raw) for raw in dict.fromkeys(r.old for r in self.rotations) if raw in olds]

    @property
    def trusted(self) -> list[PublicKey]:
        """The keys that may have sealed what there is, in the order in which they were used."""
        return [] if self.public is None else [*self.retired, self.public]

    def way_from(self, old: bytes) -> tuple[Rotation, ...]:
        """The rotations that lead from a key to the one in use; none if it is that, or if none lead there."""
        if self.public is None:
            return ()
        nexts = {one.old: one for one in self.rotations}
        way: list[Rotation] = []
        while old != self.public.raw:
            step = nexts.pop(old, None)
            if step is None:
                return ()
            way.append(step)
            old = step.new
        return tuple(way)


def _signed(old: bytes, new: bytes, time_ns: int) -> bytes:
    return _CONTEXT + old + new + time_ns.to_bytes(8, "little")
