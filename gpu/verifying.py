"""Verify: are the bytes in memory the bytes of the version?

One rule: what is reported verified was hashed where it lies, all of it, in this call.

All parts of all tensors of one device are hashed in one call of its Hasher, for a device is only busy with
many of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from ckptfs.gpu.asking import expectation_of
from ckptfs.gpu.claims import Claim, Outcome, claims_of
from ckptfs.gpu.cpu_hasher import CPU
from ckptfs.gpu.expected import Expectation
from ckptfs.gpu.extent_table import ExtentTable
from ckptfs.gpu.extents import Hasher
from ckptfs.gpu.hashers import hasher_for
from ckptfs.gpu.held import Held, Unheld
from ckptfs.gpu.holding import held_tensors
from ckptfs.gpu.matching import Matcher
from ckptfs.gpu.report import BadRange, Reason, Refusal, Report, Status, TensorReport
from ckptfs.gpu.stored import Stored, stored_tensors

Hashers = Callable[[str], AbstractContextManager[Hasher]]
_BadRows = Mapping[Claim, list[int]]


def _with_torch(device: str) -> AbstractContextManager[Hasher]:
    """Tensors on a device are torch's."""
    return hasher_for(device, with_torch=device != CPU)


def verify_tensors(
    tensors: object,
    version: str | Expectation,
    *,
    prefix: str | None = None,
    hashers: Hashers = _with_torch,
) -> Report:
    """As `ckptfs.gpu.verify`; `hashers(device)` gives who hashes on a device, for a `with`."""
    found = [*held_tensors(tensors)]
    expectation = version if isinstance(version, Expectation) else expectation_of(version, _ways(found))
    started = time.monotonic()
    stored = stored_tensors(expectation)
    outcomes = claims_of(found, Matcher(stored, (one.name for one in found), prefix))
    claims = [one for one in outcomes if isinstance(one, Claim) and one.twin is None]
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


def _ways(found: Iterable[Held | Unheld]) -> int:
    """Among how many ranks most of the tensors are divided of which this one holds rows."""
    counts = Counter(one.ways for one in found if isinstance(one, Held) and one.ways > 1)
    return max(counts, key=lambda ways: counts[ways], default=1)


def _hashed(claims: Sequence[Claim], hashers: Hashers) -> _BadRows:
    """The numbers of the bad parts of each claim that has any."""
    bad: dict[Claim, list[int]] = {}
    for device in sorted({one.held.device for one in claims if one.count}):
        asked = [one for one in claims if one.held.device == device]
        with hashers(device) as hasher:
            wrong = hasher.mismatches(_extents(asked))
        ends = np.cumsum([one.count for one in asked])
        for index in wrong:
            number = int(np.searchsorted(ends, index, "right"))
            one = asked[number]
            bad.setdefault(one, []).append(index - int(ends[number]) + one.count)
    return bad


def _extents(claims: Iterable[Claim]) -> ExtentTable:
    """All parts of all claims, in order."""
    wanted = [(claim.held.address, one) for claim in claims for one in claim.wanted]
    addresses = [
        np.uint64(address) + (one.parts.offsets - one.shift).astype(np.uint64) for address, one in wanted
    ]
    return ExtentTable(
        np.concatenate(addresses),
        np.concatenate([one.parts.lengths for _, one in wanted]).astype(np.uint64),
        np.concatenate([one.parts.digests for _, one in wanted]),
    )


def _row(one: Outcome, bad: _BadRows) -> TensorReport:
    if isinstance(one, Unheld):
        return _refused(one.name, one.device, one.size_bytes, one.refusal)
    held = one.held
    if isinstance(one, Claim):
        wrong = bad.get(one.twin or one, [])
        return TensorReport(
            name=held.name,
            status=Status.CORRUPT if wrong else Status.VERIFIED,
            device=held.device,
            size_bytes=held.length,
            stored_as=one.stored.name,
            tied_to=None if one.twin is None else one.twin.held.name,
            bad=tuple(_bad_range(one, number) for number in wrong),
        )
    # No byte of an empty tensor can be wrong, and files do not store it.
    if not held.length and one.refusal.reason is Reason.NOT_IN_VERSION:
        return TensorReport(name=held.name, status=Status.VERIFIED, device=held.device, size_bytes=0)
    return _refused(held.name, held.device, held.length, one.refusal)


def _bad_range(claim: Claim, number: int) -> BadRange:
    for one in claim.wanted:
        if number < len(one.parts):
            part = one.parts.part(number)
            return BadRange(part.offset - one.shift, part.length, part.chunk, one.path, part.offset)
        number -= len(one.parts)
    raise AssertionError("a Hasher names only extents that it was given")


def _refused(name: str, device: str, size_bytes: int, refusal: Refusal) -> TensorReport:
    return TensorReport(
        name=name, status=Status.UNVERIFIABLE, device=device, size_bytes=size_bytes, refusal=refusal
    )


def _missing(stored: Mapping[str, list[Stored]], rows: Iterable[TensorReport]) -> tuple[str, ...]:
    """The names that only the version has."""
    claimed = {row.stored_as for row in rows} | {row.name for row in rows if row.refusal is not None}
    return tuple(sorted(name for name in stored if name not in claimed))
