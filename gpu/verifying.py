"""Verify: are the bytes in memory the bytes of the version?

One rule: what is reported verified was hashed where it lies, all of it, in this call. Memory that several
names share is hashed once for each content that it should have.

All parts of all tensors of one device are hashed in one call of its Hasher, for a device is only busy with
many of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ckptfs.gpu.asking import expectation_of
from ckptfs.gpu.cpu_hasher import CPU
from ckptfs.gpu.expected import Expectation
from ckptfs.gpu.extents import Extent, Hasher
from ckptfs.gpu.hashers import hasher_for
from ckptfs.gpu.held import Held, Unheld
from ckptfs.gpu.holding import held_tensors
from ckptfs.gpu.matching import Matcher, Wanted, wanted_of
from ckptfs.gpu.report import BadRange, Reason, Refusal, Report, Status, TensorReport
from ckptfs.gpu.stored import Stored, stored_tensors

_Memory = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class _Claim:
    """A tensor in memory and what its bytes should be; `twin` is the claim of the same memory with which
    it is hashed."""

    held: Held
    stored: Stored
    wanted: list[Wanted]
    twin: _Claim | None = None


def _with_torch(device: str) -> AbstractContextManager[Hasher]:
    """Tensors on a device are torch's."""
    return hasher_for(device, with_torch=device != CPU)


def verify_tensors(
    tensors: object,
    version: str | Expectation,
    *,
    prefix: str | None = None,
    hashers: Callable[[str], AbstractContextManager[Hasher]] = _with_torch,
) -> Report:
    """As `ckptfs.gpu.verify`; `hashers(device)` gives who hashes on a device, for a `with`."""
    expectation = version if isinstance(version, Expectation) else expectation_of(version)
    stored = stored_tensors(expectation)
    found = [*held_tensors(tensors)]
    matcher = Matcher(stored, (one.name for one in found), prefix)
    started = time.monotonic()
    outcomes = _tied([_claimed(one, matcher) for one in found])
    claims = [one for one in outcomes if isinstance(one, _Claim) and one.twin is None]
    bad = _hashed(claims, hashers)
    rows = tuple(_row(one, bad) for one in outcomes)
    return Report(
        version=expectation.name,
        unit=expectation.unit,
        number=expectation.number,
        device=", ".join(sorted({one.device for one in rows})),
        tensors=rows,
        missing=_missing(stored, rows),
        hashed_bytes=sum(one.held.length for one in claims),
        elapsed_s=time.monotonic() - started,
    )


def _claimed(one: Held | Unheld, matcher: Matcher) -> _Claim | tuple[Held, Refusal] | Unheld:
    if isinstance(one, Unheld):
        return one
    stored = matcher.find(one.name)
    if isinstance(stored, Refusal):
        return one, stored
    wanted = wanted_of(one, stored)
    return (one, wanted) if isinstance(wanted, Refusal) else _Claim(one, stored, wanted)


def _tied(
    outcomes: Iterable[_Claim | tuple[Held, Refusal] | Unheld],
) -> list[_Claim | tuple[Held, Refusal] | Unheld]:
    """Claims of the same memory and content get one twin; so do names that only memory has, because a
    file stores tied tensors once."""
    outcomes = list(outcomes)
    first: dict[tuple[_Memory, tuple[bytes, ...]], _Claim] = {}
    by_memory: dict[tuple[object, ...], _Claim] = {}
    joined: list[_Claim | tuple[Held, Refusal] | Unheld] = []
    for one in outcomes:
        if isinstance(one, _Claim):
            twin = first.setdefault((_memory(one.held), tuple(w.part.digest for w in one.wanted)), one)
            by_memory.setdefault(_described_memory(one.held), one)
            one = (
                one if twin is one or not one.held.length else _Claim(one.held, one.stored, one.wanted, twin)
            )
        joined.append(one)
    for index, one in enumerate(joined):
        if isinstance(one, tuple) and one[1].reason is Reason.NOT_IN_VERSION and one[0].length:
            twin_of = by_memory.get(_described_memory(one[0]))
            if twin_of is not None:
                joined[index] = _Claim(one[0], twin_of.stored, twin_of.wanted, twin_of)
    return joined


def _memory(held: Held) -> _Memory:
    return held.device, held.address, held.length


def _described_memory(held: Held) -> tuple[object, ...]:
    return *_memory(held), held.dtype, held.local_shape, held.shape


def _hashed(
    claims: list[_Claim], hashers: Callable[[str], AbstractContextManager[Hasher]]
) -> Mapping[int, list[Wanted]]:
    """What is wrong of each claim, by its identity."""
    bad: dict[int, list[Wanted]] = {}
    for device in sorted({one.held.device for one in claims if one.wanted}):
        asked = [(one, wanted) for one in claims if one.held.device == device for wanted in one.wanted]
        extents = [
            Extent(one.held.address + wanted.offset, wanted.part.length, wanted.part.digest)
            for one, wanted in asked
        ]
        with hashers(device) as hasher:
            wrong = hasher.mismatches(extents)
        for index in wrong:
            one, wanted = asked[index]
            bad.setdefault(id(one), []).append(wanted)
    return bad


def _row(one: _Claim | tuple[Held, Refusal] | Unheld, bad: Mapping[int, list[Wanted]]) -> TensorReport:
    if isinstance(one, Unheld):
        return _refused(one.name, one.device, one.size_bytes, one.refusal)
    if not isinstance(one, _Claim):
        held, refusal = one
        # No byte of an empty tensor can be wrong, and files do not store it.
        if not held.length and refusal.reason is Reason.NOT_IN_VERSION:
            return TensorReport(name=held.name, status=Status.VERIFIED, device=held.device, size_bytes=0)
        return _refused(held.name, held.device, held.length, refusal)
    wrong = bad.get(id(one.twin or one), [])
    return TensorReport(
        name=one.held.name,
        status=Status.CORRUPT if wrong else Status.VERIFIED,
        device=one.held.device,
        size_bytes=one.held.length,
        stored_as=one.stored.name,
        tied_to=None if one.twin is None else one.twin.held.name,
        bad=tuple(_bad_range(one) for one in wrong),
    )


def _bad_range(one: Wanted) -> BadRange:
    return BadRange(one.offset, one.part.length, one.part.chunk, one.path, one.part.offset)


def _refused(name: str, device: str, size_bytes: int, refusal: Refusal) -> TensorReport:
    return TensorReport(
        name=name, status=Status.UNVERIFIABLE, device=device, size_bytes=size_bytes, refusal=refusal
    )


def _missing(stored: Mapping[str, list[Stored]], rows: Iterable[TensorReport]) -> tuple[str, ...]:
    """The names that only the version has."""
    claimed = Counter(row.stored_as for row in rows)
    refused = {row.name for row in rows if row.refusal is not None}
    return tuple(sorted(name for name in stored if not claimed[name] and name not in refused))
