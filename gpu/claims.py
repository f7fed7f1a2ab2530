"""Tensors in memory with what their bytes should be, and which of them are the same memory.

One rule: memory that several names share is hashed once for each content that it should have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ckptfs.gpu.held import Held, Unheld
from ckptfs.gpu.matching import Matcher, Wanted, wanted_of
from ckptfs.gpu.report import Reason, Refusal
from ckptfs.gpu.stored import Stored


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A tensor in memory and what its bytes should be; `twin` is the claim of the same memory and content
    with which it is hashed."""

    held: Held
    stored: Stored
    wanted: list[Wanted]
    twin: Claim | None = None

    @property
    def count(self) -> int:
        """How many parts it has."""
        return sum(len(one.parts) for one in self.wanted)


@dataclass(frozen=True, slots=True)
class Refused:
    """A tensor in memory that cannot be verified."""

    held: Held
    refusal: Refusal


Outcome = Claim | Refused | Unheld
_Key = tuple[object, ...]


def claims_of(found: Iterable[Held | Unheld], matcher: Matcher) -> list[Outcome]:
    """What becomes of each tensor, in their order."""
    return _tied([_claimed(one, matcher) for one in found])


def _claimed(one: Held | Unheld, matcher: Matcher) -> Outcome:
    if isinstance(one, Unheld):
        return one
    stored = matcher.find(one.name)
    if isinstance(stored, Refusal):
        return Refused(one, stored)
    wanted = wanted_of(one, stored)
    return Refused(one, wanted) if isinstance(wanted, Refusal) else Claim(one, stored, wanted)


def _tied(outcomes: list[Outcome]) -> list[Outcome]:
    """With the twins; a name that only memory has gets one too, for a file stores tied tensors once."""
    first: dict[_Key, list[Claim]] = {}
    joined: list[Outcome] = []
    for one in outcomes:
        if isinstance(one, Claim) and one.held.length:
            others = first.setdefault(_memory(one.held), [])
            twin = next((other for other in others if _content(other) == _content(one)), None)
            if twin is None:
                others.append(one)
            else:
                one = replace(one, twin=twin)
        joined.append(one)
    return [_with_stored_twin(one, first) for one in joined]


def _with_stored_twin(one: Outcome, first: dict[_Key, list[Claim]]) -> Outcome:
    if not isinstance(one, Refused) or one.refusal.reason is not Reason.NOT_IN_VERSION:
        return one
    twins = (other for other in first.get(_memory(one.held), ()) if _form(other.held) == _form(one.held))
    twin = next(twins, None)
    return one if twin is None else Claim(one.held, twin.stored, twin.wanted, twin)


def _memory(held: Held) -> _Key:
    return held.device, held.address, held.length


def _form(held: Held) -> _Key:
    return held.dtype, held.local_shape, held.shape


def _content(claim: Claim) -> bytes:
    return b"".join(one.parts.digests.tobytes() for one in claim.wanted)
