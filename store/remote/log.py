"""The log of a remote: found, read, added to.

One rule: an entry counts only once it was read back and has a copy: whoever relies on one sees to that first.
So what cannot be read and has no copy was never relied on by anybody, and is passed over.

Source: FORMAT.md, "Remotes", "Collecting".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from ckptfs.store.errors import CkptfsError, Conflict, Corrupt, NotFound, Unavailable
from ckptfs.store.ids import UnitId
from ckptfs.store.remote.kept import EVERYTHING, Kept, decode_kept
from ckptfs.store.remote.log_entry import (
    Claim,
    Decision,
    Entry,
    Extension,
    Join,
    decode_entry,
    encode_entry,
)
from ckptfs.store.remote.names import COPY, kept_key, log_key
from ckptfs.store.remote.objects import Remote

WAIT_S = 60.0
POLL_S = 1.0
EXTEND_S = WAIT_S / 3
_TRIES = 16


class RemoteLog:
    """What is known of a remote's log. Belongs to one thread; one caller at a time.

    `end`: the number of the last entry. `claim`: the newest claim; `is_open`: it is not decided yet.
    `decided`: the newest claim whose decision names what is left, `kept` by name. `joined`: the units that
    joined since the entry at which reading began. `problems`: sentences on what was damaged.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self.end = 0
        self.claim = 0
        self.decided = 0
        self.kept_name = b""
        self.joined: dict[UnitId, Join] = {}
        self.problems: list[str] = []
        self._open = 0
        self._extensions = 0
        self._kept = EVERYTHING

    @property
    def is_open(self) -> bool:
        """Whether a claim waits for its decision."""
        return self._open != 0

    @property
    def generation(self) -> int:
        """What new packs and heads get. No claim may be open."""
        assert not self._open, "a claim is open"
        return self.claim

    async def refresh(self, *, only_read: bool = True) -> None:
        """Read what has come. Who changes anything on the remote may not `only_read`: then an entry whose
        maker died before he copied it gets its copy here. Corrupt: an entry is damaged, and so is its copy.
        Other errors as the remote raises."""
        number = self.end + 1 if self.end else await self._first()
        while await self._is_there(number):
            entry = await self._read(number)
            if entry is not None and not only_read:
                await self._copy(number, entry)
            self._take(number, entry)
            number += 1

    async def settle(self, wait_s: float | None = None) -> None:
        """The same; and wait for the decision on a claim that is open, at most so long (None: WAIT_S) behind
        it or what last extended it: then it is called off."""
        await self.refresh(only_read=False)
        most_s, heard = WAIT_S if wait_s is None else wait_s, self._extensions
        with trio.move_on_after(most_s) as patience:
            while self._open:
                await trio.sleep(POLL_S)
                await self.refresh(only_read=False)
                if self._extensions != heard:
                    heard, patience.deadline = self._extensions, trio.current_time() + most_s
        while self._open:
            await self.add(Decision(self._open))

    async def add(self, entry: Entry, unless: Callable[[], bool] = lambda: False) -> int:
        """Add an entry; its number. What others add before it is read first, and `unless` asked: then
        nothing is added, and 0 returned. Durable when: this returned."""
        for _ in range(_TRIES):
            await self.refresh(only_read=False)
            if unless():
                return 0
            number = self.end + 1
            try:
                await self._remote.create_unnamed(log_key(number), encode_entry(number, entry))
            except (Conflict, Corrupt):
                continue  # somebody else was faster, whole or torn
            if await self._read(number) == entry:
                await self._copy(number, entry)
                self._take(number, entry)
                return number
        raise Unavailable(f"the log of {self._remote.url} grows faster than it can be added to; try again")

    async def keep_alive(self, entry: Extension) -> None:
        """Extend a claim, again and again, until it is decided or this is cancelled: no other caller may use
        this log meanwhile."""
        while self._open == entry.claim:
            await trio.sleep(EXTEND_S)
            try:
                await self.add(entry, lambda: self._open != entry.claim)
            except (CkptfsError, OSError):
                continue  # the collection has its own tries, and its own errors

    async def kept(self) -> Kept:
        """What counts, as of the newest decision. Corrupt: it is damaged, and so is its copy."""
        while self._kept.claim != self.decided:
            found, wrong = await self._read_kept()
            if found is not None:
                self._kept = found
                continue
            before = self.decided
            await self.refresh()
            if self.decided == before:
                raise Corrupt(f"what the last collection of {self._remote.url} left cannot be told: {wrong}")
        return self._kept

    async def check(self) -> None:
        """Read all entries and what was kept, with their copies; what is wrong is put right, and told in
        `problems`. Raises as the remote does."""
        kept = await self.kept()
        for number in range(1, self.end + 1):
            try:
                entry = await self._read(number)
            except Corrupt as e:  # one that newer decisions have made moot
                self.problems.append(str(e))
                continue
            if entry is not None:
                await self._check_copy(log_key(number) + COPY, encode_entry(number, entry))
        if kept.claim:
            await self._check_copy(kept_key(self.kept_name) + COPY, kept.encode())

    async def _check_copy(self, key: str, content: bytes) -> None:
        try:
            if await self._remote.get_unnamed(key) == content:
                return
        except (Corrupt, NotFound):
            pass
        await self._remote.replace_unnamed(key, content)
        self.problems.append(f"{self._remote.url}/{key} was damaged; healed from what it is a copy of")

    # ---- reading ----------------------------------------------------------------------------

    async def _first(self) -> int:
        """Where to begin: at the newest claim whose decision names what is left, or at the first entry."""
        last = await dense_end(self._is_there)
        decisions: dict[int, Decision] = {}
        for number in range(last, 0, -1):
            entry = await self._read(number)
            if isinstance(entry, Decision):
                decisions[entry.claim] = entry  # the last that is met is the first behind its claim
            elif isinstance(entry, Claim) and number in decisions and decisions[number].kept:
                return number
        return 1

    def _take(self, number: int, entry: Entry | None) -> None:
        """Know of the entry of this number."""
        self.end = number
        match entry:
            case Join():
                self.joined[entry.unit] = entry
            case Claim():
                self.claim = self._open = number  # whoever claims has seen the one before decided
            case Extension() if entry.claim == self._open:
                self._extensions += 1
            case Decision() if entry.claim == self._open:
                self._open = 0
                if entry.kept:
                    self.decided, self.kept_name = entry.claim, entry.kept

    async def _read(self, number: int) -> Entry | None:
        """An entry; None: it is void. Corrupt: it was relied on, and cannot be told any more."""
        key = log_key(number)
        try:
            return decode_entry(await self._remote.get_unnamed(key), number)
        except (Corrupt, NotFound) as e:
            wrong = e
        try:
            copy = await self._remote.get_unnamed(key + COPY)
            entry = decode_entry(copy, number)
        except NotFound:
            return None
        except Corrupt as e:
            raise Corrupt(
                f"{self._remote.url}/{key} and its copy are both damaged ({wrong}; {e}): what may be relied "
                "on there cannot be told; bring one of them back (an older version of the object, a backup), "
                "or copy to another place"
            ) from None
        healed = await self._healed(self._remote.replace_unnamed(key, copy))
        told = f"{self._remote.url}/{key}: {wrong}; {healed}"
        self.problems += [told] if told not in self.problems else []
        return entry

    async def _healed(self, healing: Awaitable[object]) -> str:
        """What came of it: who may only read goes by the copy all the same."""
        try:
            await healing
        except (CkptfsError, OSError) as e:
            return f"read from its copy, and not healed: {e}"
        return "healed from its copy"

    async def _is_there(self, number: int) -> bool:
        key = log_key(number)
        if await self._remote.stat_or_none(key) is not None:
            return True
        return await self._remote.stat_or_none(key + COPY) is not None

    async def _read_kept(self) -> tuple[Kept | None, str]:
        """What the newest decision left; None and why, if it is gone or damaged."""
        name, key, wrong = self.kept_name, kept_key(self.kept_name), list[str]()
        for source in (key, key + COPY):
            try:
                kept = decode_kept(await self._remote.get(source, name))
                if kept.claim != self.decided:
                    raise Corrupt(f"{source} is that of another claim")
            except (Corrupt, NotFound) as e:
                wrong.append(str(e))
                continue
            for damaged in wrong:
                healed = await self._healed(self._remote.put(key, name, kept.encode()))
                self.problems.append(f"{damaged}; {healed}")
            return kept, ""
        return None, wrong[0]

    async def _copy(self, number: int, entry: Entry) -> None:
        """Have a copy of an entry there, if there is none. Whether one that is there has rotted since is
        looked at by `check`."""
        key, encoded = log_key(number) + COPY, encode_entry(number, entry)
        if await self._remote.stat_or_none(key) is not None:
            return
        try:
            await self._remote.create_unnamed(key, encoded)
            if await self._remote.get_unnamed(key) == encoded:
                return
        except (Conflict, Corrupt):
            pass
        # It arrived torn, or somebody else's did: what it is a copy of was read just now.
        await self._remote.replace_unnamed(key, encoded)


async def dense_end(is_there: Callable[[int], Awaitable[bool]]) -> int:
    """The last of numbers that are dense from 1 (0: none), by doubling and halving."""
    low, high = 0, 1
    while await is_there(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if await is_there(middle):
            low = middle
        else:
            high = middle
    return low
