"""SIGHUP: the configuration is read again, and what can change while files are open changes.

One rule: a configuration that a start would refuse changes nothing, and the mount says so until a good one is
read. What cannot change in a running mount keeps its value, and is named.

Source: ARCHITECTURE.md, section 8; sd_notify(3).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import trio

from ckptfs.daemon.config import Config, load_config
from ckptfs.store.errors import InvalidRequest

log = logging.getLogger(__name__)
FIXED = frozenset({"units", "key", "remote", "copies", "write_path"})
"""What a mount keeps as long as it lives: what its units are, who signs them, where copies go, how files are
opened."""


class Told(Protocol):
    """Who has to know that a reload goes on."""

    def reloading(self) -> None:
        """It begins."""

    def reloaded(self) -> None:
        """It has ended, one way or the other."""


@dataclass(frozen=True, slots=True)
class Reread:
    """A configuration that was read again: `config` is in force from now on, `changed` and `waiting` are the
    keys that are other than before, those that are in force and those that need a restart."""

    config: Config
    changed: tuple[str, ...]
    waiting: tuple[str, ...]

    def __str__(self) -> str:
        said = f"changed {', '.join(self.changed)}" if self.changed else "nothing changed"
        if self.waiting:
            said += f"; {', '.join(self.waiting)} can only change at a restart"
        return said


def compared(old: Config, new: Config) -> Reread:
    """What `new` changes in a mount that runs with `old`."""
    other = [key for key in Config.__struct_fields__ if getattr(old, key) != getattr(new, key)]
    waiting = tuple(key for key in other if key in FIXED)
    kept = {key: getattr(old, key) for key in waiting}
    changed = tuple(key for key in other if key not in FIXED)
    return Reread(msgspec.structs.replace(new, **kept), changed, waiting)


class Reloader:
    """Reads the file `path` again when told to. Belongs to the trio thread; one reload at a time.

    `refusal` says why what the file has now is not in force; "" if it is.
    """

    def __init__(self, path: str | None, config: Config, apply: Callable[[Reread], None], told: Told) -> None:
        """`apply` puts into force what has changed; it does not fail."""
        self._path = path
        self._config = config
        self._apply = apply
        self._told = told
        self._one_at_a_time = trio.Lock()
        self.refusal = ""

    async def reload(self) -> None:
        """Read the configuration again; says in the log what came of it."""
        async with self._one_at_a_time:
            self._told.reloading()
            try:
                await self._reload()
            finally:
                self._told.reloaded()

    async def _reload(self) -> None:
        if self._path is None:
            log.info("no configuration file was named at the start; there is nothing to read again")
            return
        try:
            new = await trio.to_thread.run_sync(load_config, self._path, abandon_on_cancel=True)
        except InvalidRequest as e:
            self.refusal = str(e)
            log.error("the new configuration is refused, the old one stays in force: %s", e)
            return
        self.refusal = ""
        reread = compared(self._config, new)
        self._config = reread.config
        self._apply(reread)
        log.info("the configuration was read again: %s", reread)
