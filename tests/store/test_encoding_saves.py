"""encoding_saves: every file is in exactly one save, and of each kind one file is the newest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.encoding_plan import path_key, path_step
from ckptfs.store.encoding_saves import SavedFile, group_saves, newest_files
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import RecipeId


def file(path: str, version: int, content: str = "") -> SavedFile:
    return SavedFile(path, RecipeId(chunk_id(f"{path} {version} {content}".encode())), 1, version, version)


PATHS = ("model.pt", "checkpoint-100/m.bin", "checkpoint-200/m.bin", "checkpoint-200/o.bin", "step3.pt")
files = st.lists(st.tuples(st.sampled_from(PATHS), st.integers(1, 5)), unique=True, max_size=20).map(
    lambda pairs: [file(path, version) for path, version in pairs]
)


@given(files)
def test_every_file_is_in_one_save(found: list[SavedFile]) -> None:
    saves = group_saves(found)
    assert sorted((one for save in saves for one in save.files.values()), key=str) == sorted(found, key=str)
    for save in saves:
        assert {path_step(path) for path in save.files} == {save.step}
        if save.step is None:
            assert {one.version for one in save.files.values()} == {save.number}
    orders = [(save.step or 0, save.number) for save in saves]
    assert orders == sorted(orders)


@given(files)
def test_one_file_of_each_kind_is_the_newest(found: list[SavedFile]) -> None:
    newest = newest_files(found)
    kinds = {path_key(one.path) for one in found}
    assert len(newest) == len(kinds)
    for one in found:
        if one.recipe in newest:
            same = [other for other in found if path_key(other.path) == path_key(one.path)]
            assert max(other.order for other in same) == one.order


def test_the_files_of_a_step_are_one_save_whatever_version_they_came_in() -> None:
    early = [file("run/checkpoint-100/a.bin", 1), file("run/checkpoint-100/b.bin", 2)]
    late = file("run/checkpoint-200/a.bin", 3)
    first, second = group_saves([late, *early])
    assert set(first.files) == {one.path for one in early} and set(second.files) == {late.path}
    assert newest_files([*early, late]) == {late.recipe, early[1].recipe}


def test_a_step_that_is_saved_again_is_another_save() -> None:
    saves = group_saves([file("step3.pt", 1), file("step3.pt", 2), file("step3.json", 2)])
    assert [(save.step, save.number, len(save.files)) for save in saves] == [(3, 1, 2), (3, 2, 1)]
