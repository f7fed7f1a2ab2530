"""When a save that many ranks write is whole: torch DCP, DeepSpeed, Megatron.

One rule: every rank's part must be there, or be known to lie on another node. Which ranks write
elsewhere cannot be seen from a tree (a lost shard looks the same), so it is the caller's to say;
by default an absent part is missing.

Source: torch/distributed/checkpoint/filesystem.py; `_get_ckpt_name` and `_get_zero_ckpt_name` in
deepspeed/runtime/engine.py; `get_checkpoint_name` in megatron/training/checkpointing.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Final

from ckptfs.store.formats import dcp, dcp_metadata
from ckptfs.store.formats.file_verdict import Folder, Judge
from ckptfs.store.formats.save_names import join, split
from ckptfs.store.formats.save_values import Findings

_DCP_RANK: Final = re.compile(r"__(\d{1,9})_\d{1,9}\.distcp")
_MODEL_STATES: Final = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
_OPTIM_STATES: Final = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
_MP_RANK: Final = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
_MEGATRON_FILE: Final = "model_optim_rng.pt"
MAX_RANKS: Final = 100_000


def judge_dcp(
    directory: str, folder: Folder, judge: Judge, elsewhere_ranks: frozenset[int], found: Findings
) -> None:
    """Hold the shards that are there against `.metadata`, whose rename commits the save."""
    commits = [name for name in folder if dcp_metadata.is_commit_name(name)]
    shards = [name for name in folder if name.endswith(dcp.SUFFIX)]
    lengths: dict[str, int | None] = {}
    for name in commits:
        verdict = judge.shards(join(directory, name))
        if verdict.damage is None:
            lengths.update(verdict.lengths)
        elif shards:
            found.lack(join(directory, name), verdict.damage)
    if not lengths and not shards:
        return
    found.kinds.add("dcp")
    if not commits:
        _judge_uncommitted(directory, folder, judge, elsewhere_ranks, found)
    for name, expected in lengths.items():
        path = join(directory, name)
        view = folder.get(name)
        if "/" in name:
            view, found.local = judge.files.get(path), False
        rank = _DCP_RANK.fullmatch(name)
        if view is not None:
            damage = dcp.length_damage(view.size, expected) if expected is not None else None
            if damage is not None:
                found.lack(path, damage)
        elif rank is not None and int(rank[1]) in elsewhere_ranks:
            found.elsewhere.append(path)
        else:
            found.lack(path)


def _judge_uncommitted(
    directory: str, folder: Folder, judge: Judge, elsewhere_ranks: frozenset[int], found: Findings
) -> None:
    path = join(directory, dcp_metadata.FILE_NAME)
    # Rank 0 writes it. On a node without rank 0 nothing says how long the shards should be.
    if 0 not in elsewhere_ranks:
        found.lack(path)
        return
    found.elsewhere.append(path)
    for name, view in folder.items():
        # A rank that has nothing to save writes an empty shard.
        if name.endswith(dcp.SUFFIX) and view.size > 0:
            shard = join(directory, name)
            objection = judge.tensors(shard, view).objection
            if objection is not None:
                found.lack(shard, objection)


def is_deepspeed_name(name: str) -> bool:
    """Tell whether DeepSpeed gives a rank's part this name."""
    return _MODEL_STATES.fullmatch(name) is not None or _OPTIM_STATES.fullmatch(name) is not None


def judge_deepspeed(
    directory: str, folder: Folder, judge: Judge, elsewhere_ranks: frozenset[int], found: Findings
) -> None:
    """Find ranks without model states or ZeRO shards.

    How many ranks there are is what the model states say (`dp_world_size`, `mp_world_size`), and
    at least what the file names show. Global ranks are taken to count model parallel ranks first.
    """
    found.kinds.add("deepspeed")
    models: set[tuple[int | None, int]] = set()
    optims: set[tuple[int, int]] = set()
    prefix, dp_count, mp_count = "", 1, 1
    for name, view in folder.items():
        if match := _MODEL_STATES.fullmatch(name):
            models.add((int(match[1]) if match[1] else None, int(match[2])))
            numbers = judge.tensors(join(directory, name), view).numbers
            dp_count = max(dp_count, numbers.get("dp_world_size", 0))
            mp_count = max(mp_count, numbers.get("mp_world_size", 0))
        elif match := _OPTIM_STATES.fullmatch(name):
            prefix = match[1] or ""
            optims.add((int(match[2]), int(match[3])))
    dp_count = max(dp_count, *(1 + (dp or 0) for dp, _ in models | optims))
    mp_count = max(mp_count, *(1 + mp for _, mp in models | optims))
    if dp_count * mp_count > MAX_RANKS:
        found.lack(directory, f"speaks of {dp_count * mp_count} ranks")
        return
    by_rank = any(dp is not None for dp, _ in models)
    for dp, mp in product(range(dp_count), range(mp_count)):
        absent = []
        if by_rank and (dp, mp) not in models:
            absent.append(f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt")
        elif not by_rank and dp == 0 and (None, mp) not in models:
            absent.append(f"mp_rank_{mp:02d}_model_states.pt")
        if optims and (dp, mp) not in optims:
            absent.append(f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt")
        paths = [join(directory, name) for name in absent]
        (found.elsewhere if dp * mp_count + mp in elsewhere_ranks else found.missing).extend(paths)


def is_megatron_directory(name: str) -> bool:
    """Tell whether Megatron gives a model parallel rank's directory this name."""
    return _MP_RANK.fullmatch(name) is not None


def judge_megatron(root: str, folders: Mapping[str, Folder], found: Findings) -> None:
    """Find gaps in the grid of `mp_rank_TT[_PPP[_EEE]]` directories, and files one of them lacks."""
    ranks: dict[tuple[str, ...], Folder] = {}
    for directory, folder in folders.items():
        parent, name = split(directory)
        match = _MP_RANK.fullmatch(name) if parent == root else None
        if match is not None:
            ranks[tuple(part for part in match.groups() if part is not None)] = folder
    if not ranks:
        return
    found.kinds.add("megatron")
    depth = max(map(len, ranks))
    sizes = [1 + max(int(key[axis]) for key in ranks if len(key) > axis) for axis in range(depth)]
    if prod(sizes) > MAX_RANKS:
        found.lack(root, f"speaks of {prod(sizes)} ranks")
        return
    files = {name for folder in ranks.values() for name in folder if name.endswith(".pt")}
    for coordinates in product(*map(range, sizes)):
        key = tuple(f"{rank:0{2 if axis == 0 else 3}d}" for axis, rank in enumerate(coordinates))
        folder = ranks.get(key, {})
        for name in sorted(files or {_MEGATRON_FILE}):
            if name not in folder:
                found.lack(join(join(root, "mp_rank_" + "_".join(key)), name))
