"""What the requests about remotes do: push, pull, collect, and what is there.

One rule: they are the store owner's alone: what goes to a remote, and what comes from there, is everybody's
who has that remote, whatever the modes say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ckptfs.daemon import messages
from ckptfs.daemon.addresses import Addresses
from ckptfs.daemon.copying import Check, Copying, Report
from ckptfs.daemon.fetching import Fetching
from ckptfs.daemon.merging import Merging
from ckptfs.daemon.messages import Json
from ckptfs.daemon.queries import public_key, units_of
from ckptfs.daemon.remote_collecting import RemoteCollecting
from ckptfs.fusefs.rollback import Rolled, Wanted
from ckptfs.store.errors import Conflict, InvalidRequest
from ckptfs.store.histories import Histories

RemoteRequest = messages.Push | messages.Pull | messages.Remotes | messages.RemoteGc


class RollingBack(Protocol):
    """Gives units the trees of their versions."""

    async def roll_back(self, wanted: Sequence[Wanted], uid: int | None) -> list[Rolled]:
        """As Rollback.roll_back in fusefs. Durable when: this returned."""


class RemoteService:
    """Carries these requests out, for whoever may. Belongs to the index thread."""

    def __init__(
        self,
        addresses: Addresses,
        histories: Histories,
        copying: Copying,
        fetching: Fetching,
        merging: Merging,
        collecting: RemoteCollecting,
        rolling_back: RollingBack,
    ) -> None:
        self._addresses = addresses
        self._histories = histories
        self._copying = copying
        self._fetching = fetching
        self._merging = merging
        self._collecting = collecting
        self._rolling_back = rolling_back

    async def answer(self, request: RemoteRequest, report: Report) -> Json:
        """The result; a CkptfsError says why there is none."""
        match request:
            case messages.Push():
                return await self._push(request, report)
            case messages.Pull():
                return await self._pull(request, report)
            case messages.RemoteGc():
                return await self._collecting.collect(
                    request.remote,
                    dry_run=request.dry_run,
                    every_node=request.every_node,
                    give_up=request.give_up,
                )
        return await self._fetching.listing(request.remote, [public_key(text) for text in request.keys])

    async def _push(self, request: messages.Push, report: Report) -> Json:
        units, number = self._histories.units(), None
        if request.path != "/":
            address = self._addresses.find(request.path)
            units = units_of(address)
            if address.version is not None:
                number = self._addresses.record(address).number
        return await self._copying.push(
            units,
            number,
            request.remote,
            partial=request.partial,
            check=Check.READ if request.verify else Check.LISTS if request.again else Check.NO,
            report=report,
        )

    async def _pull(self, request: messages.Pull, report: Report) -> Json:
        keys = [public_key(text) for text in request.keys]
        if request.merge:
            if request.tensors:
                raise InvalidRequest("a merge is of whole files; fetch a tensor of one node, or merge first")
            pulled, answer = await self._merging.merge(request, keys, report)
        elif request.nodes or request.prefer or request.keep_both:
            raise InvalidRequest("`nodes`, `prefer` and `keep_both` are for a merge")
        else:
            pulled, answer = await self._fetching.pull(request, keys, report)
        why: str | None = "it was not asked for"
        if request.live:
            try:
                await self._rolling_back.roll_back([Wanted(0, pulled.record)], None)
                why = None
            except (InvalidRequest, Conflict) as e:
                why = str(e)
        return {**answer, "live": why is None, "why": why}
