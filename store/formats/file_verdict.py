"""Whether single files are whole, remembered for as long as their content does not change.

One rule: a verdict depends on a file's name and bytes alone, so (path, identity) is its key and an
unchanged file is never opened twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from ckptfs.store.formats import dcp_metadata, torch_legacy, torch_zip
from ckptfs.store.formats.bounded_json import MAX_JSON_BYTES, TooLarge, members, parse_members
from ckptfs.store.formats.layout import Reader
from ckptfs.store.formats.recognise import parse, probe_format
from ckptfs.store.formats.save_names import is_model_name, is_torch_name, split, step_of_name
from ckptfs.store.formats.save_values import Checkpoint, Findings
from ckptfs.store.formats.torch_objects import top_level_numbers

TENSOR_SUFFIXES: Final = frozenset({"safetensors", "pt", "pth", "ckpt", "bin", "gguf"})
_LIGHTNING_KEY: Final = "pytorch-lightning_version"
_STEP_KEYS: Final = ("global_step", "global_steps", "iteration", "step")
_NUMBERS: Final = frozenset({*_STEP_KEYS, "dp_world_size", "mp_world_size", _LIGHTNING_KEY})
_MAX_TRACKER_BYTES: Final = 4096


class FileView(Protocol):
    """A file of the tree that is judged."""

    @property
    def size(self) -> int:
        """Length in bytes."""

    @property
    def identity(self) -> Hashable:
        """Equal for equal bytes."""

    def open(self) -> Reader:
        """Return a reader of the bytes; it is used at once and not kept."""


Folder = Mapping[str, FileView]
"""The files of one directory by name."""


@dataclass(frozen=True, slots=True)
class TensorVerdict:
    """What a file that may hold tensors is.

    `kind` is the kind of save that it makes, None for a file of no known format. `objection` is
    why it is not whole, `step` the step it records itself, `numbers` other facts out of a torch
    file, and `alone` the save that it is when it belongs to no other.
    """

    kind: str | None
    objection: str | None
    step: int | None
    numbers: Mapping[str, int]
    alone: Checkpoint | None


@dataclass(frozen=True, slots=True)
class IndexVerdict:
    """The shards that a `*.index.json` names, or what is wrong with it."""

    shards: tuple[str, ...]
    damage: str | None


@dataclass(frozen=True, slots=True)
class TrainerVerdict:
    """The step in a `trainer_state.json`, or what is wrong with it."""

    step: int | None
    damage: str | None


@dataclass(frozen=True, slots=True)
class ShardsVerdict:
    """The length that `.metadata` gives each shard (None: it was too large to tell), or damage."""

    lengths: Mapping[str, int | None]
    damage: str | None


@dataclass(frozen=True, slots=True)
class TrackerVerdict:
    """The one line of a tracker file (`latest`), or None when it holds something else."""

    line: str | None


_Verdict = TypeVar("_Verdict", TensorVerdict, IndexVerdict, TrainerVerdict, ShardsVerdict, TrackerVerdict)
Cache = MutableMapping[tuple[str, Hashable], object]


class Judge:
    """Gives verdicts on the files of one tree. Owned by one task; the cache is the caller's."""

    def __init__(self, files: Mapping[str, FileView], cache: Cache) -> None:
        self.files = files
        self._cache = cache

    def tensors(self, path: str, view: FileView) -> TensorVerdict:
        """Judge a file of the tree that may hold tensors."""
        # Spelled out, for this runs once a file: 10,000 files should cost a few milliseconds.
        known = self._cache.get((path, view.identity))
        return (
            known
            if isinstance(known, TensorVerdict)
            else self._remembered(path, TensorVerdict, _judge_tensors)
        )

    def index(self, path: str) -> IndexVerdict:
        """Judge a `*.index.json`."""
        return self._remembered(path, IndexVerdict, _judge_index)

    def trainer_state(self, path: str) -> TrainerVerdict:
        """Judge a `trainer_state.json`."""
        return self._remembered(path, TrainerVerdict, _judge_trainer_state)

    def shards(self, path: str) -> ShardsVerdict:
        """Judge a `.metadata` of a distributed checkpoint."""
        return self._remembered(path, ShardsVerdict, _judge_shards)

    def tracker(self, path: str) -> TrackerVerdict:
        """Read a tracker file."""
        return self._remembered(path, TrackerVerdict, _judge_tracker)

    def _remembered(
        self, path: str, kind: type[_Verdict], judge: Callable[[Reader, str], _Verdict]
    ) -> _Verdict:
        view = self.files[path]
        key = (path, view.identity)
        known = self._cache.get(key)
        if isinstance(known, kind):
            return known
        verdict = judge(view.open(), path)
        self._cache[key] = verdict
        return verdict


def _judge_tensors(reader: Reader, path: str) -> TensorVerdict:
    name = split(path)[1]
    layout = parse(reader, name)
    if layout is None:
        return TensorVerdict(None, _why_unjudged(reader, name), None, {}, None)
    known = layout.format
    root: object = None
    if known == torch_zip.NAME:
        root = torch_zip.read_object(reader)
    elif known == torch_legacy.NAME:
        root = torch_legacy.read_object(reader)
    numbers = top_level_numbers(root, _NUMBERS)
    kind = "torch" if known.startswith("torch") else known
    kind = "lightning" if _LIGHTNING_KEY in numbers else kind
    step = next((numbers[key] for key in _STEP_KEYS if key in numbers), None)
    in_name = step_of_name(name)
    found = Findings({kind}, step if in_name is None else in_name)
    damage = layout.damage
    if damage is not None:
        found.lack(path, damage)
    return TensorVerdict(kind, damage, step, numbers, found.checkpoint(path))


def _why_unjudged(reader: Reader, name: str) -> str | None:
    """What to say of a file whose tensors cannot be found; None where there need not be any."""
    known = probe_format(reader.pread(0, 64), name)
    if known is not None:
        return f"begins as a {known} file, and cannot be read as one"
    if is_torch_name(name):
        return "is no torch file"
    return "is of no known format" if is_model_name(name) else None


def _judge_index(reader: Reader, path: str) -> IndexVerdict:
    try:
        top = dict(parse_members(reader.pread(0, MAX_JSON_BYTES + 1)))
    except TooLarge:
        return IndexVerdict((), "is larger than ckptfs reads")
    except ValueError as error:
        return IndexVerdict((), str(error))
    shards = {shard for _, shard in members(top.get("weight_map")) if isinstance(shard, str)}
    return IndexVerdict(tuple(sorted(shards)), None if shards else "names no shard")


def _judge_trainer_state(reader: Reader, path: str) -> TrainerVerdict:
    try:
        top = dict(parse_members(reader.pread(0, MAX_JSON_BYTES + 1)))
    except TooLarge:
        return TrainerVerdict(None, "is larger than ckptfs reads")
    except ValueError as error:
        return TrainerVerdict(None, str(error))
    step = top.get("global_step")
    if not isinstance(step, int) or not 0 <= step < 1 << 62:
        return TrainerVerdict(None, "has no global_step")
    return TrainerVerdict(step, None)


def _judge_shards(reader: Reader, path: str) -> ShardsVerdict:
    shards = dcp_metadata.read_shards(reader)
    if shards is None:
        return ShardsVerdict({}, "truncated or unreadable")
    lengths = {
        path: max((one.offset + one.length for one in extents), default=None)
        for path, extents in shards.extents.items()
    }
    return ShardsVerdict(lengths, None)


def _judge_tracker(reader: Reader, path: str) -> TrackerVerdict:
    raw = reader.pread(0, _MAX_TRACKER_BYTES + 1) if reader.size <= _MAX_TRACKER_BYTES else b""
    line = raw.decode("utf-8", "surrogateescape").strip()
    return TrackerVerdict(line if line and len(line.splitlines()) == 1 else None)
