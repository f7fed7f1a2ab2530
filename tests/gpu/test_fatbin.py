"""The fatbin is made from the source beside it and holds every kernel for every target."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from emulated import SOURCES as SOURCE_FOLDER
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.gpu import build_fatbin, fatbin
from ckptfs.gpu.fatbin import FATBIN, KERNELS, RECORD, SOURCES, TARGETS, Record, entry_points, load_fatbin
from ckptfs.store.errors import Corrupt


def shipped_record() -> Record:
    return msgspec.json.decode((SOURCE_FOLDER / RECORD).read_bytes(), type=Record)


def test_every_kernel_for_every_target() -> None:
    assert entry_points(load_fatbin()) == {target: list(KERNELS) for target in TARGETS}


def test_every_source_is_recorded() -> None:
    assert {file.name for file in SOURCE_FOLDER.iterdir()} == {*SOURCES, FATBIN, RECORD}
    assert set(shipped_record().sources) == set(SOURCES)


def test_nothing_spills() -> None:
    usage = shipped_record().usage
    assert list(usage) == [target for target in TARGETS if target.startswith("sm_")]
    for kernels in usage.values():
        assert list(kernels) == list(KERNELS)
        for used in kernels.values():
            assert (used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) == (0, 0, 0)
            # Or fewer than 8 blocks of 128 threads fit on a multiprocessor.
            assert used.registers <= 64


@pytest.mark.parametrize("name", [*SOURCES, FATBIN, RECORD])
def test_a_change_of_any_file_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = tmp_path / "native"
    shutil.copytree(SOURCE_FOLDER, native)
    monkeypatch.setattr(fatbin, "folder", lambda: native)
    load_fatbin()
    changed = bytearray((native / name).read_bytes())
    # Of the record, a digit of a digest.
    changed[changed.index(b'"fatbin": "') + 15 if name == RECORD else len(changed) // 2] ^= 1
    (native / name).write_bytes(changed)
    with pytest.raises(Corrupt, match="GPU kernels"):
        load_fatbin()
    (native / name).unlink()
    with pytest.raises(Corrupt, match="install ckptfs again"):
        load_fatbin()


@given(st.data())
def test_any_bytes(data: st.DataObject) -> None:
    """A list of kernels, or Corrupt, nothing else."""
    whole = bytearray(load_fatbin())
    end = data.draw(st.integers(0, len(whole)))
    for place in data.draw(st.lists(st.integers(0, 400), max_size=8)):
        whole[place] = data.draw(st.integers(0, 255))
    for image in (bytes(whole[:end]), bytes(whole)):
        try:
            assert isinstance(entry_points(image), dict)
        except Corrupt:
            pass


def test_the_compiler_makes_the_same_file() -> None:
    """Where there is the very compiler that the record names, it has to come to the same bytes."""
    if build_fatbin.compiler() != shipped_record().compiler:
        pytest.skip(f"no nvcc {shipped_record().compiler} on the PATH")
    assert build_fatbin.build() == (load_fatbin(), shipped_record())
