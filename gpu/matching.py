"""Which bytes of the version a tensor in memory has to have.

One rule: nothing is guessed. A tensor is compared with the one of its name, dtype and shape; where that is
not there, or not the only one, it is refused with what there is instead.

Names: a saved dictionary may hold the state dict under a key (`model.`), and wrappers add parts of their
own to the names in memory (`module.`, `_orig_mod.`). Both are allowed for, and the report says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

import numpy as np

from ckptfs.gpu.held import Held
from ckptfs.gpu.parts import Parts
from ckptfs.gpu.report import Reason, Refusal
from ckptfs.gpu.stored import Stored
from ckptfs.store.errors import Corrupt, InvalidRequest

# torch.compile, FSDP and DDP; what they wrap was or will be saved without them.
_WRAPPERS: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_DATA_PARALLEL: Final = "module."
_MOST_NAMES: Final = 10_000


@dataclass(frozen=True, slots=True)
class Wanted:
    """Parts of the file `path` that bytes in memory should be: the byte that lies at `shift` in the file is
    the first one in memory."""

    path: str
    parts: Parts
    shift: int


class Matcher:
    """Finds what a version has for tensors in memory. Owned by one task."""

    def __init__(self, stored: Mapping[str, list[Stored]], names: Iterable[str], prefix: str | None) -> None:
        """`prefix` is what names in the version begin with; None: found out from `names`, those in
        memory. InvalidRequest if there are several that fit equally well."""
        self._stored = stored
        self.prefix = _found_prefix(stored, [*names]) if prefix is None else prefix

    def find(self, name: str) -> Stored | Refusal:
        """The tensor of a name in memory."""
        for wanted in dict.fromkeys((name, _unwrapped(name))):
            found = self._stored.get(self.prefix + wanted, [])
            if len(found) == 1:
                return found[0]
            if found:
                places = ", ".join(one.folder or one.slabs[0].file.path for one in found[:3])
                sentence = f"{len(found)} places of the version have it, {places}; name one of them"
                return Refusal(Reason.AMBIGUOUS, sentence)
        near = get_close_matches(self.prefix + name, [*self._stored][:_MOST_NAMES], n=1, cutoff=0.8)
        hint = f"; there is {near[0]}" if near else ""
        return Refusal(Reason.NOT_IN_VERSION, f"the version has no tensor {self.prefix + name}{hint}")


def wanted_of(held: Held, stored: Stored) -> list[Wanted] | Refusal:
    """What the bytes of a tensor in memory should be, or why that cannot be told."""
    refusal = _differing(held, stored)
    if refusal is not None:
        return refusal
    try:
        wanted = _wanted(held, stored)
    except Corrupt as e:
        return Refusal(Reason.DAMAGED, f"{e}; `ckptfs verify` says what is damaged")
    if isinstance(wanted, Refusal):
        return wanted
    covered = sum(int(one.parts.lengths.sum()) for one in wanted)
    if covered != held.length:
        sentence = f"{held.length} bytes here, of which the version describes {covered}"
        return Refusal(Reason.DAMAGED, sentence)
    return wanted


def _wanted(held: Held, stored: Stored) -> list[Wanted] | Refusal:
    same = next(
        (slab for slab in stored.slabs if _is_same_block(held, slab.offsets, slab.tensor.shape)), None
    )
    if same is not None:
        return [Wanted(same.file.path, same.parts(), same.tensor.offset)]
    if stored.refusal is not None:
        return stored.refusal
    if not held.is_rows:
        return Refusal(
            Reason.COLUMN_SHARD, f"a block of columns, {list(held.local_shape)} of {list(held.shape)}"
        )
    return _rows(held, stored)


def _differing(held: Held, stored: Stored) -> Refusal | None:
    if stored.is_untyped and held.is_whole and held.length == stored.size_bytes:
        return None
    if held.dtype != stored.dtype:
        sentence = f"{held.dtype} here and {stored.dtype} in the version; was it converted on loading?"
        return Refusal(Reason.DTYPE, sentence)
    if held.shape == stored.shape or (stored.refusal is not None and len(held.shape) == len(stored.shape)):
        return None
    return Refusal(Reason.SHAPE, f"{list(held.shape)} here and {list(stored.shape)} in the version")


def _is_same_block(held: Held, offsets: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return held.offsets == offsets and held.local_shape == shape


def _rows(held: Held, stored: Stored) -> list[Wanted] | Refusal:
    """The parts of the rows that are held. Their edges must be edges of parts."""
    start, stop = held.start, held.start + held.length
    found, at = [], 0
    for slab in stored.slabs:
        low, high = max(start, at), min(stop, at + slab.tensor.length)
        if low < high:
            parts, shift = slab.parts(), slab.tensor.offset - at
            first = int(np.searchsorted(parts.offsets, low + shift))
            last = int(np.searchsorted(parts.offsets, high + shift))
            ends_at = parts.offsets[last] if last < len(parts) else slab.tensor.end
            if first == len(parts) or parts.offsets[first] != low + shift or ends_at != high + shift:
                sentence = (
                    f"bytes {start} to {stop} of it, within chunks; `ckptfs expect --ways N` is for N ranks"
                )
                return Refusal(Reason.SHARD_EDGE, sentence)
            found.append(Wanted(slab.file.path, parts.between(first, last), shift + start))
        at += slab.tensor.length
    return found


def _found_prefix(stored: Mapping[str, list[Stored]], names: list[str]) -> str:
    """What has to be put before the names in memory: nothing if that finds any of them."""
    wanted = {*names, *map(_unwrapped, names)}
    if any(name in stored for name in wanted):
        return ""
    counts: Counter[str] = Counter()
    for name in stored:
        at = name.find(".")
        while at >= 0:
            if name[at + 1 :] in wanted:
                counts[name[: at + 1]] += 1
            at = name.find(".", at + 1)
    best = [prefix for prefix, count in counts.items() if count == max(counts.values())]
    if len(best) > 1:
        several = ", ".join(sorted(best)[:3])
        raise InvalidRequest(f"the version has these tensors below {several}; choose one with prefix=")
    return best[0] if best else ""


def _unwrapped(name: str) -> str:
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name.removeprefix(_DATA_PARALLEL)
