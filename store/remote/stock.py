"""Which packs of a remote are needed for what is to stay. Pure.

One rule: of several packs that hold a chunk the one counts of which most is needed; so what little is left
of the others can go.

Source: FORMAT.md, "Remotes", "Collecting".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import ChunkId, cid_text
from ckptfs.store.remote.shard import (
    Keys,
    PackFacts,
    Rows,
    chunk_of_key,
    find_rows,
    keys,
    keys_of,
    sorted_rows,
)

Mask = npt.NDArray[np.bool_]


class Missing(Corrupt):
    """Chunks lie in no pack that counts: none is damaged that could be healed."""


@dataclass(frozen=True, slots=True)
class Stock:
    """Packs, and all rows that lie in those that are there (`pack` is a number in `packs`), in the order of
    their chunks, whose keys are `ids`; see stock_of.

    What it answers takes up to a second a million rows: for a worker thread.
    """

    packs: Sequence[PackFacts]
    rows: Rows
    ids: Keys

    def rows_of(self, wanted: Keys) -> Rows:
        """A row of each of these, in the order of pack and offset; Missing names one that is nowhere."""
        at = self.ids.searchsorted(wanted)
        if len(self.ids):
            at = np.where(self.ids[np.minimum(at, len(self.ids) - 1)] == wanted, at, -1)
        else:
            at = np.full(len(wanted), -1, np.intp)
        _check_all(wanted, at)
        found = self.rows[at]
        return found[np.lexsort((found["offset"], found["pack"]))]

    def needed(self, wanted: Keys) -> Needed:
        """Where these chunks (sorted) are to be had; Missing names one that is nowhere."""
        rows = self.rows[find_keys(wanted, self.ids)]
        held = self._bytes_of(self.rows)
        share = self._bytes_of(rows) / np.maximum(1, held)
        # Of those of which all is needed first what was copied over, then what holds more.
        newest = np.array([pack.generation for pack in self.packs], np.int64)
        rank = np.empty(len(self.packs), np.int64)
        rank[np.lexsort((-held, -newest, -share))] = np.arange(len(self.packs))
        rows = sorted_rows(rows[np.argsort(rank[rows["pack"]], kind="stable")])
        _check_all(wanted, find_rows(rows, wanted))
        return Needed(rows, self._bytes_of(rows), held)

    def only_copies(self, found: Needed, wanted: Keys) -> Mask:
        """Which packs would hold the only copy of some chunk (of `wanted`, sorted), if no others stayed than
        those that `found` needs, and do not today."""
        rows = self.rows[find_keys(wanted, self.ids)]
        at = find_rows(found.rows, keys(rows[~found.packs[rows["pack"]]]))
        mask = np.zeros(len(self.packs), np.bool_)
        mask[found.rows["pack"][at]] = True
        return mask

    def without(self, packs: Mask) -> Stock:
        """The same without what these packs hold and others hold as well."""
        is_there = packs[self.rows["pack"]]
        left = ~(is_there & find_keys(self.ids[~is_there], self.ids))
        return Stock(self.packs, self.rows[left], self.ids[left])

    def others_of(self, chunk: ChunkId) -> Rows:
        """All rows of a chunk."""
        wanted = keys_of([chunk])[0]
        found: Rows = self.rows[self.ids.searchsorted(wanted) : self.ids.searchsorted(wanted, "right")]
        return found

    def _bytes_of(self, rows: Rows) -> npt.NDArray[np.int64]:
        return np.bincount(rows["pack"], rows["stored"], len(self.packs)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Needed:
    """One row of each chunk that is needed, how many bytes of each pack these are, and of how many that it
    holds."""

    rows: Rows
    used: npt.NDArray[np.int64]
    held: npt.NDArray[np.int64]

    @property
    def packs(self) -> Mask:
        """Which packs are needed."""
        mask: Mask = self.used > 0
        return mask

    @property
    def sparse(self) -> Mask:
        """Which are needed for less than half of what they hold."""
        mask: Mask = self.packs & (2 * self.used < self.held)
        return mask

    def rows_in(self, packs: Mask) -> Rows:
        """The rows in these packs, in the order of pack and offset."""
        rows: Rows = self.rows[packs[self.rows["pack"]]]
        ordered: Rows = rows[np.lexsort((rows["offset"], rows["pack"]))]
        return ordered


def stock_of(packs: Sequence[PackFacts], rows: Rows) -> Stock:
    """A stock of rows in any order; sorts them, once."""
    order = np.argsort(keys(rows), kind="stable")
    ordered: Rows = rows[order]
    return Stock(packs, ordered, keys(ordered))


def find_keys(wanted: Keys, have: Keys) -> Mask:
    """Which of `have` are among `wanted` (sorted)."""
    if not len(wanted):
        return np.zeros(len(have), np.bool_)
    at = np.minimum(np.searchsorted(wanted, have), len(wanted) - 1)
    mask: Mask = wanted[at] == have
    return mask


def _check_all(wanted: Keys, at: npt.NDArray[np.intp]) -> None:
    lost = wanted[at < 0]
    if len(lost):
        chunk = chunk_of_key(bytes(lost[0]))
        raise Missing(f"{len(lost)} chunks are missing, {cid_text(chunk)} for one", expected=chunk)
