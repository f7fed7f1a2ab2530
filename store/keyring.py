"""The keys of those who seal: the one in use, and those that are trusted with it.

One rule: whoever signs or checks asks the keyring each time, so that a new key is everybody's at once.

Source: FORMAT.md, "Seals".
"""

from __future__ import annotations

from ckptfs.store.signing import PublicKey, SigningKey


class Keyring:
    """Belongs to the index thread. `signing` seals, None: nothing is sealed, or the key is another's."""

    __slots__ = ("_public", "signing")

    def __init__(self, signing: SigningKey | None = None, public: PublicKey | None = None) -> None:
        """`public` is the key that is trusted where there is no private one to sign with."""
        self.signing = signing
        self._public = public

    @property
    def public(self) -> PublicKey | None:
        """The public half of the key in use, as far as it is known."""
        return self._public if self.signing is None else self.signing.public

    @property
    def trusted(self) -> list[PublicKey]:
        """The keys that may have sealed what there is, in the order in which they were used."""
        return [] if self.public is None else [self.public]
