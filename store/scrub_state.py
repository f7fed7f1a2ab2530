"""What a scrub has found so far, and what the last one found: kept in the index across restarts.

One rule: a scrub that was interrupted goes on behind the last segment that it has noted here; what it
found before that is not lost.

Source: FORMAT.md, "Scrub".
"""

from __future__ import annotations

import msgspec

from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import ChunkId

RUNNING_KEY = b"scrub_running"
LAST_KEY = b"scrub_last"
MOST_FINDINGS = 1000


class Finding(msgspec.Struct, frozen=True, array_like=True):
    """Something wrong. `place` says where it is ("segments/ab/….seg at byte 4096"), `what` in words.

    `chunk` is there if it is one, `path` (below the root of the mount) and `tensor` if they are
    known; `healed` if it was put right.
    """

    place: str
    what: str
    chunk: ChunkId | None = None
    healed: bool = False
    path: str | None = None
    tensor: str | None = None


class ScrubRun(msgspec.Struct, frozen=True, array_like=True):
    """One run. Segments below `next_segment` are done; `finished_ns` is 0 while it goes on."""

    started_ns: int
    finished_ns: int = 0
    next_segment: int = 0
    checked_bytes: int = 0
    chunks: int = 0
    findings: tuple[Finding, ...] = ()
    more_findings: int = 0

    @property
    def corrupt(self) -> int:
        """How much is still wrong."""
        return sum(not one.healed for one in self.findings) + self.more_findings

    @property
    def healed(self) -> int:
        """How much was put right."""
        return sum(one.healed for one in self.findings)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ScrubRun)


def encode_run(run: ScrubRun) -> bytes:
    """Packed bytes of a run."""
    return _encoder.encode(run)


def decode_run(encoded: bytes) -> ScrubRun:
    """The run in `encoded`, or Corrupt."""
    try:
        return _decoder.decode(encoded)
    except msgspec.DecodeError as e:
        raise Corrupt(f"not the state of a scrub: {e}") from None
