"""`ckptfs import` into a store that nobody has mounted: it is opened for as long as that takes.

One rule: what a mount would do on opening and closing a store is done here too; only nobody looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from ckptfs.daemon.import_service import ImportService
from ckptfs.daemon.keys import load_keyring
from ckptfs.daemon.messages import AnyRequest, Import, Progress, unreported
from ckptfs.daemon.open_store import OpenStore, opened_store
from ckptfs.store.errors import Unavailable


@contextmanager
def importing_store(path: str, key: str) -> Iterator[OfflineImport]:
    """The store at `path`, `key` as in the configuration. Conflict if another process has it."""
    with opened_store(path, "", "", lambda: load_keyring(key)) as parts:
        yield OfflineImport(parts)


class OfflineImport:
    """Answers imports, and no other request."""

    def __init__(self, parts: OpenStore) -> None:
        self._parts = parts

    def ask(self, request: AnyRequest, on_progress: Callable[[Progress], None] | None = None) -> object:
        """As Source.ask. Durable when: this returned."""
        if not isinstance(request, Import):
            raise Unavailable("this store is open for an import only")
        return trio.run(self._answer, request, on_progress or unreported)

    async def _answer(self, request: Import, report: Callable[[Progress], None]) -> object:
        answer = await ImportService(self._parts, None).answer(request, report)
        self._parts.index.commit()
        return answer
