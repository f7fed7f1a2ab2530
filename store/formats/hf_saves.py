"""When a save of the Hugging Face libraries is whole: model and adapter directories, Trainer.

One rule: what the writer writes last proves what it wrote before. save_pretrained writes shards
before their index; Trainer writes the model, training_args.bin, optimizer.pt, scheduler.pt, RNG
states and then trainer_state.json; PEFT writes adapter weights before adapter_config.json.

Source: `_save_checkpoint` in transformers/trainer.py (5.x), `save_pretrained` in
modeling_utils.py, `PeftModel.save_pretrained`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from ckptfs.store.formats.file_verdict import Folder, Judge
from ckptfs.store.formats.save_names import is_model_name, is_trainer_directory, join, split
from ckptfs.store.formats.save_values import Findings

TRAINER_STATE: Final = "trainer_state.json"
_ADAPTER_CONFIG: Final = "adapter_config.json"
_ADAPTERS: Final = ("adapter_model.safetensors", "adapter_model.bin")
_WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin", *_ADAPTERS)
_SHARD: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin)")
_INDEX: Final = re.compile(r".+\.index(?:\.\w+)?\.json")
_RNG: Final = re.compile(r"rng_state_(\d{1,6})\.pth")
# Written before trainer_state.json, if at all: `save_only_model` leaves them out.
_COMPANIONS: Final = ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth")
_TRAINER_ONLY: Final = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")
_ACCELERATE_ONLY: Final = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl")


def judge_model(directory: str, folder: Folder, judge: Judge, found: Findings) -> None:
    """Find shards that an index names and that are absent, and shards without an index.

    Whether each file that is there is whole is another rule's question.
    """
    found.kinds.add("hf-model")
    indexed: set[str] = set()
    for name in folder:
        if name.endswith(".json") and _INDEX.fullmatch(name):
            verdict = judge.index(join(directory, name))
            if verdict.damage is not None:
                found.lack(join(directory, name), verdict.damage)
            indexed.update(verdict.shards)
    for shard in sorted(indexed.difference(folder)):
        path = join(directory, shard)
        if "/" in shard:
            found.local = False
        if path not in judge.files:
            found.lack(path)
    _judge_unindexed(directory, folder, indexed, found)
    _judge_adapter(directory, folder, found)


def _judge_unindexed(directory: str, folder: Folder, indexed: set[str], found: Findings) -> None:
    sets: dict[tuple[str, str, str], set[int]] = {}
    for name in folder.keys() - indexed:
        match = _SHARD.fullmatch(name) if "-of-" in name else None
        if match is not None:
            stem, number, total, suffix = match.groups()
            sets.setdefault((stem, total, suffix), set()).add(int(number))
    for (stem, total, suffix), numbers in sorted(sets.items()):
        for number in range(1, int(total) + 1):
            if number not in numbers:
                found.lack(join(directory, f"{stem}-{number:05d}-of-{total}.{suffix}"))
        index = f"{stem}.{suffix}.index.json"
        if index not in folder:
            found.lack(join(directory, index))


def _judge_adapter(directory: str, folder: Folder, found: Findings) -> None:
    weights = [name for name in _ADAPTERS if name in folder]
    if not weights and _ADAPTER_CONFIG not in folder:
        return
    found.kinds.add("peft")
    if not weights:
        found.lack(join(directory, _ADAPTERS[0]))
    if _ADAPTER_CONFIG not in folder:
        found.lack(join(directory, _ADAPTER_CONFIG))


@dataclass(frozen=True, slots=True)
class TrainerFamily:
    """The directories of one run that are named as Trainer's, and those that have its last file.

    `with_state` is sorted by step.
    """

    size: int
    with_state: tuple[tuple[int, Folder], ...]

    def others_have_state(self, folder: Folder) -> bool | None:
        """Tell whether another member has a trainer_state.json; None when there is no other."""
        if self.size <= 1:
            return None
        return len(self.with_state) > (1 if TRAINER_STATE in folder else 0)

    def before(self, step: int) -> Folder | None:
        """Return the nearest earlier member with a trainer_state.json."""
        index = bisect_left(self.with_state, step, key=lambda member: member[0])
        return self.with_state[index - 1][1] if index else None


def family_of(members: list[tuple[int, Folder]]) -> TrainerFamily:
    """Return the family of directories given by step and files."""
    with_state = sorted((one for one in members if TRAINER_STATE in one[1]), key=lambda one: one[0])
    return TrainerFamily(len(members), tuple(with_state))


NO_FAMILY: Final = TrainerFamily(0, ())


def is_trainer_save(root: str, folder: Folder, family: TrainerFamily) -> bool:
    """Tell whether a directory is one of HF Trainer's, though perhaps without its last file.

    Other programs name directories `checkpoint-N` too: what none of the others in the run has,
    this one need not have either.
    """
    if TRAINER_STATE in folder:
        return True
    if not is_trainer_directory(split(root)[1]) or any(name in folder for name in _ACCELERATE_ONLY):
        return False
    if any(name in folder for name in _TRAINER_ONLY):
        return True
    others = family.others_have_state(folder)
    if others is not None:
        return others
    return "config.json" in folder or any(map(is_model_name, folder))


def judge_trainer(
    root: str, folder: Folder, has_weights: bool, previous: Folder | None, judge: Judge, found: Findings
) -> None:
    """Judge a directory of HF Trainer.

    `has_weights`: there are weights, in whatever format. `previous` is the nearest earlier save
    of the run that has a trainer_state.json; the optimizer's files are required if it had them.
    """
    found.kinds.add("hf-trainer")
    state_path = join(root, TRAINER_STATE)
    if TRAINER_STATE not in folder:
        found.lack(state_path)
    else:
        verdict = judge.trainer_state(state_path)
        found.step = verdict.step if verdict.step is not None else found.step
        if verdict.damage is not None:
            found.lack(state_path, verdict.damage)
    if not has_weights:
        expected = next((name for name in _WEIGHTS if previous and name in previous), _WEIGHTS[0])
        found.lack(join(root, expected))
    for name in _COMPANIONS:
        if previous and name in previous and name not in folder:
            found.lack(join(root, name))
    ranks = {int(match[1]) for name in folder if name.startswith("rng_") and (match := _RNG.fullmatch(name))}
    for rank in range(max(ranks, default=-1)):
        if rank not in ranks:
            found.lack(join(root, f"rng_state_{rank}.pth"))
