"""What a verification found, tensor by tensor.

One rule: nothing is left out. Every tensor that was given is verified, corrupt or not verifiable, and what
of the version no tensor was given for is listed too; so silence is never taken for a proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from ckptfs.store.ids import ChunkId, cid_text

HOLE = "hole"


class Status(StrEnum):
    """What is known of a tensor's bytes now."""

    VERIFIED = "verified"
    CORRUPT = "corrupt"
    UNVERIFIABLE = "not verifiable"


class Reason(StrEnum):
    """Why a tensor cannot be verified; scripts may compare these words."""

    NOT_CONTIGUOUS = "not contiguous"
    DTYPE = "dtype differs"
    SHAPE = "shape differs"
    COLUMN_SHARD = "column shard"
    SHARD_EDGE = "shard ends within a chunk"
    PARTIAL = "partial sum"
    NOT_DENSE = "not dense"
    NO_MEMORY = "no memory of its own"
    DEVICE = "device not supported"
    NOT_IN_VERSION = "not in the version"
    AMBIGUOUS = "several in the version"
    DAMAGED = "not whole in the version"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why, and a sentence about it with what to do."""

    reason: Reason
    sentence: str


@dataclass(frozen=True, slots=True)
class BadRange:
    """`length` bytes from byte `offset` of the tensor in memory that are not those of `chunk` (None: a
    hole, so they should be zeros), which lies at byte `file_offset` of the file `path`."""

    offset: int
    length: int
    chunk: ChunkId | None
    path: str
    file_offset: int

    @property
    def chunk_text(self) -> str:
        """The chunk as people meet it."""
        return HOLE if self.chunk is None else cid_text(self.chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """One tensor. `stored_as` is its name in the version, `tied_to` the tensor whose memory it shares and
    with which it was hashed; `size_bytes` counts what is in memory here."""

    name: str
    status: Status
    device: str
    size_bytes: int
    stored_as: str | None = None
    tied_to: str | None = None
    bad: tuple[BadRange, ...] = ()
    refusal: Refusal | None = None

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(self._facts())}"

    def _facts(self) -> Iterator[str]:
        if self.refusal is not None:
            yield f"{self.status}: {self.refusal.sentence}"
        else:
            yield str(self.status)
        for one in self.bad:
            yield (
                f"bytes {one.offset} to {one.offset + one.length} are not those of chunk {one.chunk_text} "
                f"({one.path} at byte {one.file_offset})"
            )
        if self.tied_to is not None:
            yield f"tied to {self.tied_to}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A verification. `missing` are the version's tensors for which none was given; `hashed_bytes` what
    was hashed (tied tensors once), in `elapsed_s` seconds."""

    version: str
    unit: str
    number: int
    device: str
    tensors: tuple[TensorReport, ...]
    missing: tuple[str, ...]
    hashed_bytes: int
    elapsed_s: float

    @property
    def ok(self) -> bool:
        """Whether there is at least one tensor, and every one is verified."""
        return bool(self.tensors) and all(one.status is Status.VERIFIED for one in self.tensors)

    @property
    def verified(self) -> list[TensorReport]:
        """Those whose bytes are the version's."""
        return self._of(Status.VERIFIED)

    @property
    def corrupt(self) -> list[TensorReport]:
        """Those whose bytes are not."""
        return self._of(Status.CORRUPT)

    @property
    def unverifiable(self) -> list[TensorReport]:
        """Those of which nothing can be said, each with its reason."""
        return self._of(Status.UNVERIFIABLE)

    def __str__(self) -> str:
        lines = [str(one) for one in (*self.corrupt, *self.unverifiable)]
        counts = ", ".join(f"{len(self._of(status))} {status}" for status in Status)
        if self.missing:
            counts += f", {len(self.missing)} of the version not given"
        return "\n".join([*lines, f"{self.unit}@{self.version} on {self.device}: {counts}"])

    def to_json(self) -> dict[str, object]:
        """The same for scripts."""
        return {
            "unit": self.unit,
            "number": self.number,
            "name": self.version,
            "device": self.device,
            "ok": self.ok,
            "hashed_bytes": self.hashed_bytes,
            "elapsed_s": self.elapsed_s,
            "tensors": [_row(one) for one in self.tensors],
            "missing": list(self.missing),
        }

    def _of(self, status: Status) -> list[TensorReport]:
        return [one for one in self.tensors if one.status is status]


def _row(one: TensorReport) -> dict[str, object]:
    return {
        "name": one.name,
        "status": str(one.status),
        "device": one.device,
        "bytes": one.size_bytes,
        "stored_as": one.stored_as,
        "tied_to": one.tied_to,
        "reason": None if one.refusal is None else str(one.refusal.reason),
        "why": None if one.refusal is None else one.refusal.sentence,
        "corrupt": [
            {
                "offset": bad.offset,
                "length": bad.length,
                "chunk": bad.chunk_text,
                "path": bad.path,
                "file_offset": bad.file_offset,
            }
            for bad in one.bad
        ],
    }
