"""Opening a store for a mount, and leaving it so that nothing depends on this process any more.

One rule: what is opened is closed in the opposite order, and the lock goes last.

Order of opening: folder and format, lock, index (which replays the journal), histories (which take
from their files what the index lacks), recovery, and only then anything that writes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ckptfs.daemon.encode_orphan import end_orphan
from ckptfs.daemon.hashing_processes import HashingProcesses
from ckptfs.store.cut_ahead import CutsAhead
from ckptfs.store.disk import Disk
from ckptfs.store.errors import NoSpace
from ckptfs.store.histories import Histories
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.ingest import Ingest
from ckptfs.store.keyring import Keyring
from ckptfs.store.layout import SEALS, Holder, StoreLock, add_ro_compat, open_store
from ckptfs.store.recovery import recover
from ckptfs.store.segments import Segments
from ckptfs.store.staging import Staging

log = logging.getLogger(__name__)
_NUMBERS_A_RUN = 1 << 32
_NEXT_STAGING = b"next_staging"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True)
class OpenStore:
    """The parts of an open store. All but the disk belong to the thread that opened it.

    `keyring` has the key that versions are signed with, if they are.
    """

    disk: Disk
    index: Index
    staging: Staging
    segments: Segments
    ingest: Ingest
    histories: Histories
    keyring: Keyring
    processes: HashingProcesses
    cuts_ahead: CutsAhead


@contextmanager
def opened_store(
    path: str,
    mountpoint: str,
    socket: str,
    load_keys: Callable[[], Keyring],
    is_held: Callable[[int], bool] = lambda ino: False,
) -> Iterator[OpenStore]:
    """The store at `path` (made if it is not there) for as long as the block runs.

    `load_keys` gives the keys for versions once it is sure that this process has the store; `is_held` as in
    recover. Conflict if
    another process holds it; otherwise as open_store, load_keys, Index and recover raise.
    Durable when: the block has ended.
    """
    disk = open_store(path, create=True)
    with ExitStack() as stack:
        lock = StoreLock(disk, Holder(os.getpid(), mountpoint, socket))
        stack.callback(lock.release)
        end_orphan(disk)
        keyring = load_keys()
        if keyring.signing is not None:
            add_ro_compat(disk, SEALS)
        index = Index(disk, boot_id=boot_id())
        stack.callback(_close_index, index)
        for found in index.problems:
            log.error("the index was damaged: %s", found)
        histories = Histories(disk, index, key=keyring)
        for problem in histories.problems:
            log.error("a history is damaged: %s", problem)
        for unit in histories.units() if keyring.rotations else ():
            histories.record_rotation(unit.unit)
        segments = Segments(disk, index)
        stack.callback(segments.close)
        staging = Staging(disk, _first_staging_number(index))
        report = recover(
            disk,
            index,
            staging,
            segments.read_recipe,
            boot_id=boot_id(),
            now_ns=time.time_ns(),
            is_held=is_held,
        )
        log.info("recovery: %s", report)
        processes = HashingProcesses(disk)
        stack.callback(processes.close)
        ahead = CutsAhead(disk, segments, processes)
        ingest = Ingest(disk, index, segments, staging, cutter=ahead)
        yield OpenStore(disk, index, staging, segments, ingest, histories, keyring, processes, ahead)


def _close_index(index: Index) -> None:
    """Commit and close. On a full disk the journal, synced, keeps what cannot be committed."""
    try:
        index.close()
    except NoSpace as e:
        log.warning("%s; the next start reads them from there", e)


def _first_staging_number(index: Index) -> int:
    """The first number of this run: each run has 2^32 of its own, so that none is ever used again."""
    first = int.from_bytes(index.get(Table.META, _NEXT_STAGING) or b"\1", "big")
    change = Change()
    change.put(Table.META, _NEXT_STAGING, (first + _NUMBERS_A_RUN).to_bytes(8, "big"))
    index.apply(change, sync=True)
    return first


def boot_id() -> str:
    """What tells one run of the machine from the next."""
    with open(_BOOT_ID, encoding="ascii") as file:
        return file.read().strip()
