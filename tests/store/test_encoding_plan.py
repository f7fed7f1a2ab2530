"""Which chunks are proposed as parents: the same part of the same tensor, of an earlier save, or none."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.encoding_plan import (
    Candidates,
    Save,
    earlier_saves,
    match_save,
    path_key,
    plan_file,
    tensor_key,
)
from ckptfs.store.formats import Layout, Tensor
from ckptfs.store.formats.layout import DTYPE_BITS, arrange
from ckptfs.store.hashing import chunk_id
from ckptfs.store.recipe import Piece, Recipe
from ckptfs.store.regions import CHUNK_BYTES, Mode, plan_regions

ROWS = (1000, 300)


def layout_of(*tensors: tuple[str, str, int], gap: int = 100) -> Layout:
    """Tensors (name, dtype, rows) of 300 columns one behind the other, with something between them."""
    found, at = [], gap
    for name, dtype, rows in tensors:
        length = rows * 300 * DTYPE_BITS[dtype] // 8
        found.append(Tensor(name, at, length, dtype, (rows, 300)))
        at += length + gap
    return arrange("safetensors", at, found)


def size_of(layout: Layout) -> int:
    return max((tensor.end for tensor in layout.tensors), default=0) + 100


def recipe_of(layout: Layout, salt: str, holes: frozenset[int] = frozenset()) -> Recipe:
    """The file cut as an ingest does it, each chunk of its own content."""
    pieces = []
    for region in plan_regions(size_of(layout), layout):
        step = CHUNK_BYTES if region.mode is Mode.FIXED else region.length
        for at in range(0, region.length, step):
            length = min(step, region.length - at)
            name = chunk_id(f"{salt} {region.offset + at}".encode())
            pieces.append(Piece(length, None if len(pieces) in holes else name))
    return Recipe(pieces)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("checkpoint-100/model.safetensors", "checkpoint-#/model.safetensors"),
        ("step3.pt", "step#.pt"),
        ("a/global_step1000/mp_rank_01_model_states.pt", "a/global_step#/mp_rank_01_model_states.pt"),
        ("iter_0000100/x.pt", "iter_#/x.pt"),
        ("epoch=1-step=200.ckpt", "epoch=#-step=#.ckpt"),
        ("model-00001-of-00003.safetensors", "model-00001-of-00003.safetensors"),
        ("footstep3.pt", "footstep3.pt"),
    ],
)
def test_steps_in_paths(path: str, key: str) -> None:
    assert path_key(path) == key


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("model.layers.0.weight", "layers.0.weight"),
        ("module._orig_mod.model.layers.0.weight", "layers.0.weight"),
        ("base_model.model.layers.0.weight", "layers.0.weight"),
        ("modelling.weight", "modelling.weight"),
        ("model.", "model."),
        ("optimizer.state.0.exp_avg", "optimizer.state.0.exp_avg"),
    ],
)
def test_prefixes_of_names(name: str, key: str) -> None:
    assert tensor_key(name) == key


def test_the_nearest_earlier_step_comes_first() -> None:
    saves = [Save(step, number, {}) for number, step in enumerate([100, 300, 200, 200, None, 500], 1)]
    assert [(s.step, s.number) for s in earlier_saves(saves[1], saves)] == [(200, 4), (200, 3), (100, 1)]
    assert [(s.step, s.number) for s in earlier_saves(saves[3], saves)] == [(200, 3), (100, 1)]
    assert earlier_saves(saves[4], saves) == []


SAVES = st.lists(
    st.builds(Save, st.one_of(st.none(), st.integers(0, 5)), st.integers(1, 5), st.just({})), max_size=8
)


@given(SAVES)
def test_earlier_is_an_order(saves: list[Save]) -> None:
    for save in saves:
        found = earlier_saves(save, saves)
        assert save not in found
        for nearer, farther in pairwise(found):
            assert nearer == replace(farther) or not earlier_saves(farther, [nearer])
        for other in found:
            assert save not in earlier_saves(other, saves)
            beyond = earlier_saves(other, saves)
            assert all(one in found for one in beyond)


def test_a_tensor_finds_itself_in_the_save_before() -> None:
    layout = layout_of(
        ("model.w", "F32", 1000), ("ema.w", "F32", 1000), ("optimizer.state.0.exp_avg", "F32", 1000)
    )
    new = Save(3, 3, {"step3.pt": layout})
    old = [Save(step, step, {f"step{step}.pt": layout}) for step in (2, 1)]
    found = match_save(new, old)
    assert {
        name: (c.parent.save, c.parent.path, c.parent.tensor.name)
        for (_, name), c in found.items()
        if c.parent
    } == {name: (1, "step2.pt", name) for name in ("model.w", "ema.w", "optimizer.state.0.exp_avg")}


def test_another_file_or_prefix_will_do() -> None:
    new = Save(2, 2, {"model.safetensors": layout_of(("layers.w", "F32", 1000))})
    old = Save(1, 1, {"x.pt": layout_of(("ema.layers.w", "F32", 1000), ("model.layers.w", "F32", 1000))})
    parent = match_save(new, [old])["model.safetensors", "layers.w"].parent
    assert parent is not None and parent.tensor.name == "model.layers.w"


def test_what_is_not_in_the_save_before_is_found_further_back() -> None:
    layout = layout_of(("w", "F32", 1000))
    saves = [Save(2, 2, {"step2.pt": layout_of(("other", "F32", 1000))}), Save(1, 1, {"step1.pt": layout})]
    parent = match_save(Save(3, 3, {"step3.pt": layout}), saves)["step3.pt", "w"].parent
    assert parent is not None and parent.save == 2


@pytest.mark.parametrize("other", [("w", "BF16", 1000), ("w", "F32", 999), ("v", "F32", 1000)])
def test_another_tensor_is_no_parent(other: tuple[str, str, int]) -> None:
    new, old = Save(2, 2, {"a": layout_of(("w", "F32", 1000))}), Save(1, 1, {"a": layout_of(other)})
    assert match_save(new, [old]) == {}


def test_numbers_of_storages_mean_something_in_their_file_only() -> None:
    layout = layout_of(("data/0", "F32", 1000))
    old = Save(1, 1, {"b.pt": layout})
    assert match_save(Save(2, 2, {"a.pt": layout}), [old]) == {}
    assert match_save(Save(2, 2, {"b.pt": layout}), [old]) != {}


def test_a_bfloat16_export_finds_what_it_is_the_cast_of() -> None:
    files = {
        "x.pt": layout_of(("ema.w", "F32", 1000), ("model.w", "F32", 1000)),
        "export.safetensors": layout_of(("w", "BF16", 1000)),
    }
    found = match_save(Save(1, 1, files), [])["export.safetensors", "w"]
    assert found.parent is None and [p.tensor.name for p in found.casts] == ["model.w", "ema.w"]


def test_each_chunk_of_a_tensor_gets_its_own_part() -> None:
    old = layout_of(("w", "F32", 1000), ("v", "F32", 500))
    new = layout_of(("v", "F32", 500), ("w", "F32", 1000), gap=33)
    export = layout_of(("w", "BF16", 1000), gap=7)
    files = {"x.pt": new, "export.safetensors": export}
    found = match_save(Save(2, 2, files), [Save(1, 1, {"x.pt": old})])
    recipes = {(0, "x.pt"): recipe_of(new, "new"), (1, "x.pt"): recipe_of(old, "old")}
    by_name = {name: c for (path, name), c in found.items() if path == "x.pt"}
    planned = {one.chunk: one for one in plan_file(recipes[0, "x.pt"], new, by_name, recipes)}
    for now, before in zip(new.tensors, reversed(old.tensors), strict=True):
        assert now.name == before.name
        for at in range(0, now.length, CHUNK_BYTES):
            one = planned[chunk_id(f"new {now.offset + at}".encode())]
            assert one.parent == chunk_id(f"old {before.offset + at}".encode()) and one.dtype == "F32"
    casts = {name: c for (path, name), c in found.items() if path == "export.safetensors"}
    exported = recipe_of(export, "export")
    (w,) = (tensor for tensor in new.tensors if tensor.name == "w")
    chunks = [one for one in plan_file(exported, export, casts, recipes) if one.dtype == "BF16"]
    assert len(chunks) == 3
    wanted = [chunk_id(f"new {w.offset + at}".encode()) for at in range(0, w.length, CHUNK_BYTES)]
    assert [one.cast_of for one in chunks] == [tuple(wanted[:2]), tuple(wanted[2:4]), tuple(wanted[4:])]


TENSORS = st.lists(
    st.tuples(
        st.sampled_from(["w", "model.w", "ema.w", "b", "data/0", "module.b"]),
        st.sampled_from(["F32", "BF16", "I64"]),
        st.sampled_from([1, 14, 300, 1000]),
    ),
    max_size=5,
    unique_by=lambda t: t[0],
)
LAYOUTS = st.builds(
    lambda tensors, gap: layout_of(*tensors, gap=gap), TENSORS, st.sampled_from([0, 100, 5000])
)
FILES = st.dictionaries(
    st.sampled_from(["step1.pt", "step2.pt", "m.safetensors"]), LAYOUTS, min_size=1, max_size=2
)


@given(
    st.lists(FILES, min_size=1, max_size=3), st.frozensets(st.integers(0, 8), max_size=3), st.integers(0, 3)
)
def test_plans_hold_together(saves: list[dict[str, Layout]], holes: frozenset[int], cast_choice: int) -> None:
    """Every chunk is planned once, in order; what is proposed has the right length and is another chunk."""
    new, *old = [Save(9 - number, 1, files) for number, files in enumerate(saves)]
    found = match_save(new, old)
    recipes = {
        (number, path): recipe_of(layout, f"{number} {path}", holes)
        for number, files in enumerate(saves)
        for path, layout in files.items()
    }
    lengths = {
        p.chunk: p.length for recipe in recipes.values() for p in recipe.pieces() if p.chunk is not None
    }
    for (path, name), candidate in found.items():
        (own,) = (t for t in new.files[path].tensors if t.name == name)
        if candidate.parent is not None:
            assert candidate.parent.save > 0
            assert (candidate.parent.tensor.dtype, candidate.parent.tensor.shape) == (own.dtype, own.shape)
        for cast in candidate.casts:
            assert cast.save == 0 and own.dtype == "BF16"
            assert (cast.tensor.dtype, cast.tensor.shape) == ("F32", own.shape)
    for path, layout in new.files.items():
        recipe = recipes[0, path]
        by_name: dict[str, Candidates] = {name: c for (where, name), c in found.items() if where == path}
        plan = list(plan_file(recipe, layout, by_name, recipes, cast_choice))
        assert [(one.chunk, one.length) for one in plan] == [
            (piece.chunk, piece.length) for piece in recipe.pieces() if piece.chunk is not None
        ]
        for one in plan:
            assert one.parent is None or lengths[one.parent] == one.length
            assert one.chunk != one.parent and one.chunk not in one.cast_of
            assert not one.cast_of or sum(lengths[chunk] for chunk in one.cast_of) == 2 * one.length
            assert len(one.cast_of) <= 2
            assert one.dtype is not None or (one.parent is None and not one.cast_of)


def test_a_file_of_no_known_format_has_no_parents() -> None:
    recipe = Recipe([Piece(10, chunk_id(b"a")), Piece(5, None), Piece(7, chunk_id(b"b"))])
    plan = list(plan_file(recipe, None, {}, {}))
    assert [(one.length, one.dtype, one.parent) for one in plan] == [(10, None, None), (7, None, None)]
