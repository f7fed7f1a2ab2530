"""What the request handlers need of others: room on the disk, and versions on demand."""

from __future__ import annotations

from typing import Protocol

from ckptfs.fusefs.attributes import Attributes
from ckptfs.store.disk import Space


class Snapshots(Protocol):
    """What `mkdir DIR/.versions/NAME` asks for."""

    async def snapshot(self, directory: int, name: bytes) -> Attributes:
        """Publish and tag; returns the attributes of the new version's directory."""

    def snapshot_made(self, directory: int, name: bytes) -> Attributes:
        """What `snapshot` returned; NotFound if it did not get that far."""


class Room(Protocol):
    """Who looks after the space on the disk below the store."""

    def space(self) -> Space:
        """What statfs shows."""

    async def before_writing(self) -> None:
        """Called before a file is opened for writing: the kernel may write by itself then, and get
        ENOSPC without asking, so history has to give way before."""

    async def make_room(self, wanted_bytes: int) -> bool:
        """The disk is full for a writer: True if a second try makes sense."""
