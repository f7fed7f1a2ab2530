"""`ckptfs publish`: a version at once.

One rule: what the command asks for is there when it has been answered, or nothing is.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptfs.daemon.open_store import OpenStore
from ckptfs.fusefs.face import Face
from ckptfs.fusefs.recording import Request
from ckptfs.store.history import VersionRecord


@dataclass(frozen=True, slots=True)
class CommandPublishing:
    """`ckptfs publish`: a version now, tagged in the same step as it is made."""

    face: Face
    parts: OpenStore

    async def publish_now(self, top: int, tag: str | None, step: int | None) -> VersionRecord:
        """As Publishing in service.py. Given up only when the daemon ends."""
        with self.parts.processes.hurried():
            record = await self.face.publisher.publish_now(top, Request("command", step))
        if tag is not None:
            self.parts.histories.tag(record.unit, record.number, tag)
        return record
