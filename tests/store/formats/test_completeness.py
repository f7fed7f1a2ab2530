"""Whole, partial or opaque: trees as the frameworks leave them, whole and killed on the way."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from bytes_reader import BytesReader

from ckptfs.store.formats import Reader
from ckptfs.store.formats.completeness import Assessment, Checkpoint, assess

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@dataclass(frozen=True)
class View:
    content: bytes
    identity: Hashable
    opened: list[str] | None = None

    @property
    def size(self) -> int:
        return len(self.content)

    def open(self) -> Reader:
        if self.opened is not None:
            self.opened.append(str(self.identity))
        return BytesReader(self.content)


Tree = dict[str, bytes]


def judge(tree: Tree, **options: Any) -> Assessment:
    return assess({path: View(content, content) for path, content in tree.items()}, **options)


def only(assessment: Assessment) -> Checkpoint:
    (checkpoint,) = assessment.checkpoints
    return checkpoint


@cache
def torch_file(**numbers: int) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save({"module": {"w": torch.ones(40)}, **numbers}, buffer)
    return buffer.getvalue()


@cache
def safetensors_file(seed: int = 0) -> bytes:
    import numpy as np
    import safetensors.numpy

    return safetensors.numpy.save({"w": np.full(50, seed, np.float32)})


# Hugging Face

SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]


def model_directory(prefix: str = "") -> Tree:
    index = {"metadata": {}, "weight_map": {f"layer.{i}": shard for i, shard in enumerate(SHARDS)}}
    return {
        f"{prefix}config.json": b"{}",
        **{f"{prefix}{shard}": safetensors_file(i) for i, shard in enumerate(SHARDS)},
        f"{prefix}model.safetensors.index.json": json.dumps(index).encode(),
    }


def trainer_directory(step: int, prefix: str = "") -> Tree:
    path = f"{prefix}checkpoint-{step}/"
    return {
        f"{path}config.json": b"{}",
        f"{path}model.safetensors": safetensors_file(step),
        f"{path}training_args.bin": torch_file(),
        f"{path}optimizer.pt": torch_file(),
        f"{path}scheduler.pt": torch_file(),
        f"{path}rng_state.pth": torch_file(),
        f"{path}trainer_state.json": json.dumps({"global_step": step, "log_history": []}).encode(),
    }


def test_nothing_known_is_opaque() -> None:
    for tree in ({}, {"a/notes.txt": b"x", "train.log": b"y", "data.bin": b"z" * 99, "x.pt": b"not torch"}):
        assert judge(tree) == Assessment("opaque", None, (), ())


def test_a_sharded_model() -> None:
    whole = judge(model_directory("final/"))
    assert whole.state == "complete" and only(whole).kind == "hf-model" and only(whole).path == "final"
    for shard in SHARDS:
        tree = model_directory("final/")
        del tree[f"final/{shard}"]
        assert judge(tree).missing == (f"final/{shard}",)
        tree = model_directory("final/")
        tree[f"final/{shard}"] = tree[f"final/{shard}"][:-5]
        (missing,) = judge(tree).missing
        assert missing.startswith(f"final/{shard} (truncated")


def test_shards_without_their_index() -> None:
    tree = model_directory()
    del tree["model.safetensors.index.json"]
    assert judge(tree).missing == ("model.safetensors.index.json",)
    del tree[SHARDS[1]]
    assert judge(tree).missing == (SHARDS[1], "model.safetensors.index.json")
    tree = model_directory()
    tree["model.safetensors.index.json"] = tree["model.safetensors.index.json"][:-9]
    assert judge(tree).missing == ("model.safetensors.index.json (is not JSON)",)


def test_an_adapter_needs_weights_and_configuration() -> None:
    tree = {"a/adapter_config.json": b"{}", "a/adapter_model.safetensors": safetensors_file()}
    assert judge(tree).state == "complete" and only(judge(tree)).kind == "peft"
    for name in tree:
        assert judge({other: tree[other] for other in tree if other != name}).missing == (name,)


def test_a_trainer_run() -> None:
    whole = judge({**trainer_directory(100), **trainer_directory(200), "all_results.json": b"{}"})
    assert (whole.state, whole.step, whole.missing) == ("complete", 200, ())
    assert [(one.kind, one.step, one.path) for one in whole.checkpoints] == [
        ("hf-trainer", 100, "checkpoint-100"),
        ("hf-trainer", 200, "checkpoint-200"),
    ]


@pytest.mark.parametrize("earlier", [False, True])
def test_a_trainer_killed_after_each_file(earlier: bool) -> None:
    """trainer_state.json comes last, so every earlier end lacks it."""
    before = trainer_directory(100) if earlier else {}
    files = trainer_directory(200)
    for count in range(1, len(files)):
        tree = {**before, **dict(list(files.items())[:count])}
        found = judge(tree)
        assert found.state == "partial"
        assert "checkpoint-200/trainer_state.json" in found.missing
        assert found.step == (100 if earlier else 200)
        assert ("checkpoint-200/model.safetensors" in found.missing) is (count == 1)
        assert ("checkpoint-200/optimizer.pt" in found.missing) is (earlier and count <= 3)


def test_trainer_state_that_is_cut_off() -> None:
    tree = trainer_directory(100)
    tree["checkpoint-100/trainer_state.json"] = tree["checkpoint-100/trainer_state.json"][:10]
    assert judge(tree).missing == ("checkpoint-100/trainer_state.json (is not JSON)",)


def test_rng_states_with_a_gap() -> None:
    tree = {**trainer_directory(5), **{f"checkpoint-5/rng_state_{rank}.pth": torch_file() for rank in (0, 2)}}
    assert judge(tree).missing == ("checkpoint-5/rng_state_1.pth",)


def test_save_only_model_is_complete() -> None:
    tree = {path: content for path, content in trainer_directory(7).items() if "opt" not in path}
    assert judge(tree).state == "complete"


def test_other_programs_directories_need_no_trainer_state() -> None:
    accelerate = {
        "checkpoint-5/model.safetensors": safetensors_file(),
        "checkpoint-5/optimizer.bin": torch_file(),
        "checkpoint-5/random_states_0.pkl": b"\x80\x04N.",
    }
    own_loop = {"checkpoint-5/model.pt": torch_file(), "checkpoint-9/model.pt": torch_file()}
    for tree in (accelerate, own_loop):
        assert judge(tree).state == "complete"
    assert only(judge(accelerate)).step == 5


def test_a_directory_that_was_not_renamed_yet() -> None:
    tree = {path.replace("checkpoint", "tmp-checkpoint"): c for path, c in trainer_directory(5).items()}
    assert judge(tree).missing == ("tmp-checkpoint-5 (was never renamed into place)",)


# Torch distributed checkpoints


@pytest.fixture(scope="module")
def dcp(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """What three ranks write: torch's own shard, taken as each rank's, under one metadata."""
    import pickle

    import torch
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    path = tmp_path_factory.mktemp("dcp") / "step_40"
    checkpoint.save({"w": torch.ones(3000)}, checkpoint_id=path, no_dist=True)
    shard = (path / "__0_0.distcp").read_bytes()
    names = [f"__{rank}_0.distcp" for rank in range(3)]
    storage = {
        MetadataIndex("w", torch.Size([rank])): _StorageInfo(name, 0, len(shard))
        for rank, name in enumerate(names)
    }
    metadata = pickle.dumps(Metadata({}, None, storage))
    return {f"step_40/{name}": shard for name in names} | {"step_40/.metadata": metadata}


def test_dcp_as_torch_writes_it(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as checkpoint

    checkpoint.save({"w": torch.ones(3000), "n": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    tree = {f"dcp/{one.name}": one.read_bytes() for one in (tmp_path / "dcp").iterdir()}
    assert judge(tree).state == "complete" and only(judge(tree)).kind == "dcp"
    tree["dcp/__0_0.distcp"] = b""
    (missing,) = judge(tree).missing
    assert missing.startswith("dcp/__0_0.distcp (truncated: 0 bytes of")


def test_dcp_shards_absent_short_or_elsewhere(dcp: Tree) -> None:
    assert only(judge(dcp)) == Checkpoint("step_40", "dcp", 40, "complete", ())
    absent = {path: content for path, content in dcp.items() if "__2_0" not in path}
    assert judge(absent).missing == ("step_40/__2_0.distcp",)
    elsewhere = judge(absent, elsewhere_ranks=frozenset({2}))
    assert elsewhere.state == "complete"
    assert only(elsewhere).elsewhere == ("step_40/__2_0.distcp",)
    short = {**dcp, "step_40/__1_0.distcp": dcp["step_40/__1_0.distcp"][:-1]}
    (missing,) = judge(short).missing
    assert missing.startswith("step_40/__1_0.distcp (truncated")
    # A rank with nothing to save writes an empty shard, which nothing names.
    assert judge({**dcp, "step_40/__3_0.distcp": b""}).state == "complete"


def test_dcp_without_metadata(dcp: Tree) -> None:
    tree = {path: content for path, content in dcp.items() if "metadata" not in path}
    tree["step_40/.metadata.tmp"] = b"half"
    assert judge(tree).missing == ("step_40/.metadata",)
    other_node = judge(tree, elsewhere_ranks=frozenset({0}))
    assert other_node.state == "complete" and only(other_node).elsewhere == ("step_40/.metadata",)
    tree["step_40/__1_0.distcp"] = tree["step_40/__1_0.distcp"][:-1]
    assert judge(tree, elsewhere_ranks=frozenset({0})).state == "partial"
    cut = {**dcp, "step_40/.metadata": dcp["step_40/.metadata"][:-20]}
    assert judge(cut).missing == ("step_40/.metadata (truncated or unreadable)",)


def test_metadata_files_of_the_hub_are_no_dcp() -> None:
    tree = {".cache/huggingface/download/model.safetensors.metadata": b"etag", "x/.metadata": b"notes"}
    assert judge(tree).state == "opaque"


# DeepSpeed and Megatron


def deepspeed(step: int, dp: int = 4, mp: int = 2, prefix: str = "run/") -> Tree:
    tag = f"{prefix}global_step{step}/"
    states = torch_file(dp_world_size=dp, mp_world_size=mp, global_steps=step)
    return {
        **{f"{tag}mp_rank_{m:02d}_model_states.pt": states for m in range(mp)},
        **{
            f"{tag}bf16_zero_pp_rank_{d}_mp_rank_{m:02d}_optim_states.pt": torch_file()
            for d in range(dp)
            for m in range(mp)
        },
        f"{prefix}latest": f"global_step{step}".encode(),
    }


def test_a_deepspeed_run() -> None:
    found = judge({**deepspeed(100), **deepspeed(200)})
    assert (found.state, found.step) == ("complete", 200)
    assert [one.kind for one in found.checkpoints] == ["deepspeed"] * 2


def test_each_absent_deepspeed_part_is_named() -> None:
    whole = deepspeed(100)
    for path in whole:
        found = judge({other: whole[other] for other in whole if other != path})
        assert (found.missing == (path,)) is (not path.endswith("latest")), path


def test_deepspeed_parts_of_other_nodes() -> None:
    whole = deepspeed(100)
    here = {
        path: content for path, content in whole.items() if "rank_2_" not in path and "rank_3_" not in path
    }
    assert judge(here).state == "partial"
    found = judge(here, elsewhere_ranks=frozenset({4, 5, 6, 7}))
    assert found.state == "complete" and len(only(found).elsewhere) == 4


def test_zero_3_has_model_states_by_rank() -> None:
    states = torch_file(dp_world_size=3, mp_world_size=1)
    tree = {
        f"r/global_step1/zero_pp_rank_{d}_mp_rank_00_{part}_states.pt": states
        for d in range(3)
        for part in ("model", "optim")
    }
    assert judge(tree).state == "complete"
    absent = "r/global_step1/zero_pp_rank_2_mp_rank_00_model_states.pt"
    assert judge({path: content for path, content in tree.items() if path != absent}).missing == (absent,)


def test_deepspeed_inside_a_trainer_directory() -> None:
    tree = {**trainer_directory(100), **deepspeed(100, prefix="checkpoint-100/")}
    found = judge(tree)
    assert (only(found).kind, found.state, found.step) == ("hf-trainer", "complete", 100)
    gone = {path: content for path, content in tree.items() if "global_step" not in path}
    assert judge(gone).missing == ("checkpoint-100/latest (names global_step100, which is absent)",)


def test_a_tracker_that_names_something_absent() -> None:
    tree = {**deepspeed(100), "run/latest": b"global_step200"}
    found = judge(tree)
    assert (found.state, found.step) == ("partial", 100)
    assert found.missing == ("run/latest (names global_step200, which is absent)",)
    assert judge(tree, changed=frozenset()).state == "partial"
    assert judge({**deepspeed(100), "run/latest": b""}).missing == ("run/latest (names no save)",)
    assert judge({"notes/latest": b"see the wiki"}).state == "opaque"


def test_a_tracker_that_still_names_the_step_before() -> None:
    found = judge({**deepspeed(100), **deepspeed(200), "run/latest": b"global_step100"})
    assert (found.state, found.step) == ("partial", 100)
    assert found.missing == ("run/latest (still names step 100)",)


def megatron(step: int, tp: int = 2, pp: int = 2) -> Tree:
    return {
        **{
            f"run/iter_{step:07d}/mp_rank_{t:02d}_{p:03d}/{name}": torch_file(iteration=step)
            for t in range(tp)
            for p in range(pp)
            for name in ("model_optim_rng.pt", "distrib_optim.pt")
        },
        "run/latest_checkpointed_iteration.txt": str(step).encode(),
    }


def test_a_megatron_run() -> None:
    whole = {**megatron(100), **megatron(200)}
    found = judge(whole)
    assert (found.state, found.step) == ("complete", 200)
    assert {one.kind for one in found.checkpoints} == {"megatron"}
    gap = "run/iter_0000200/mp_rank_00_001/"
    tree = {path: content for path, content in whole.items() if not path.startswith(gap)}
    assert judge(tree).missing == (gap + "distrib_optim.pt", gap + "model_optim_rng.pt")
    gone = {path: content for path, content in whole.items() if "0000200" not in path}
    assert judge(gone).missing == (
        "run/latest_checkpointed_iteration.txt (names iter_0000200, which is absent)",
    )
    release = {"run/release/mp_rank_00/model_optim_rng.pt": torch_file()}
    released = judge({**release, "run/latest_checkpointed_iteration.txt": b"release\n"})
    assert released.state == "complete" and only(released).path == "run/release"


# Single files


@pytest.mark.parametrize(
    ("name", "content", "kind", "step"),
    [
        ("step_100.pt", torch_file, "torch", 100),
        ("ckpts/model_step100.pt", torch_file, "torch", 100),
        ("step=100/weights.pth", torch_file, "torch", 100),
        ("model_final.safetensors", safetensors_file, "safetensors", None),
        ("last.pt", lambda: torch_file(global_step=17), "torch", 17),
        ("epoch=1-step=200.ckpt", lambda: torch_file(**{"pytorch-lightning_version": 2}), "lightning", 200),
    ],
)
def test_single_files(name: str, content: Callable[[], bytes], kind: str, step: int | None) -> None:
    whole = content()
    found = judge({name: whole})
    assert (found.state, only(found).kind, found.step) == ("complete", kind, step)
    for damaged in (b"", whole[:-3], whole + b"x"):
        assert judge({name: damaged}).state == "partial"


def test_a_containers_name_does_not_swallow_its_saves() -> None:
    found = judge({"stage_step2/checkpoint-5/model.pt": torch_file(), "step2/step_7/model.pt": torch_file()})
    assert [(one.path, one.step) for one in found.checkpoints] == [
        ("stage_step2/checkpoint-5", 5),
        ("step2/step_7", 7),
    ]


def test_orbax() -> None:
    done = {"ck/100/_CHECKPOINT_METADATA": b"{}", "ck/100/default/manifest.ocdbt": b"x"}
    found = judge(done)
    assert (only(found).kind, found.step, found.state) == ("orbax", 100, "complete")
    moving = {path.replace("100", "100.orbax-checkpoint-tmp-3"): content for path, content in done.items()}
    assert judge(moving).state == "partial"


# What holds a version back


def test_a_dead_partial_save_does_not_hold_back_later_versions() -> None:
    dead = {path: content for path, content in trainer_directory(200).items() if "trainer_state" not in path}
    before = {**trainer_directory(100), **dead}
    # It is the newest, so it holds its own version back, changed or not.
    assert judge(before, changed=frozenset({"log.txt"})).state == "partial"
    after = {**before, **trainer_directory(300)}
    changed = frozenset(trainer_directory(300))
    found = judge(after, changed=changed)
    assert (found.state, found.step) == ("complete", 300)
    assert found.missing == ("checkpoint-200/trainer_state.json",)
    assert [one.state for one in found.checkpoints] == ["complete", "partial", "complete"]
    # Whoever touches it again has to make it whole.
    assert judge(after, changed=changed | {"checkpoint-200/optimizer.pt"}).state == "partial"
    assert judge(after, changed=changed | {"checkpoint-200/removed.pt"}).state == "partial"
    assert judge(after, changed=changed | {"checkpoint-200/notes.txt"}).state == "partial"
    assert (
        judge(
            {**after, "checkpoint-200/notes.txt": b""}, changed=frozenset({"checkpoint-200/notes.txt"})
        ).state
        == "complete"
    )


def test_where_no_save_is_whole_no_version_is() -> None:
    """Beside a broken file without a step something else is written: still nothing to resume from."""
    tree = {"model.bin": b"no tensors", "notes.txt": b"new"}
    assert judge(tree, changed=frozenset({"notes.txt"})).state == "partial"
    whole = model_directory("final/")
    assert judge({**tree, **whole}, changed=frozenset(whole)).state == "complete"


def test_unchanged_files_are_not_opened_again() -> None:
    opened: list[str] = []
    tree = {**trainer_directory(100), **deepspeed(5), **model_directory("final/")}
    views = {path: View(content, (path, 1), opened) for path, content in tree.items()}
    known: dict[tuple[str, Hashable], object] = {}
    first = assess(views, None, known)
    assert opened
    opened.clear()
    views["checkpoint-100/optimizer.pt"] = View(torch_file(), "new", opened)
    again = assess(views, frozenset({"checkpoint-100/optimizer.pt"}), known)
    assert opened == ["new"] and again == first
    assert assess(views, None, {}) == first


def test_ten_thousand_files_with_one_changed_are_quick() -> None:
    views = {path: View(c, path) for step in range(1000) for path, c in trainer_directory(step).items()}
    for step in range(1000):
        views |= {
            f"checkpoint-{step}/{name}": View(b"", f"{step}{name}") for name in ("a.json", "b", "c.txt")
        }
    assert len(views) == 10_000
    known: dict[tuple[str, Hashable], object] = {}
    assess(views, None, known)
    took = []
    for attempt in range(5):
        views["checkpoint-7/optimizer.pt"] = View(torch_file(), attempt)
        start = time.perf_counter()
        found = assess(views, frozenset({"checkpoint-7/optimizer.pt"}), known)
        took.append(time.perf_counter() - start)
        assert found.state == "complete"
    # 25 ms where this was written; the bound leaves room for a busy machine.
    assert min(took) < 0.2, took


def test_a_name_alone_makes_no_whole_model() -> None:
    found = judge({"model.bin": bytes(range(256)) * 40})
    assert found.state == "partial" and "no known format" in found.missing[0]
