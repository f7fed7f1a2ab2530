"""The index is deleted after a kill -9: nothing that was a version is lost.

`mount` refuses such a store in one line, also if its journal still has records; `rebuild`, killed half
way and run again, brings back every version; extract.py reads the same bytes without any of it.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from mounting import Mount, memory_folder
from rebuilding import bare_copy, delete_index, extract, rebuild_command, rebuild_with_kills
from rounds import Campaign

ROUNDS = 2
MOST_ROUNDS = 20
REBUILD_KILLS = 4
EXTRACTED = 12


def test_every_version_survives_a_killed_rebuild_and_is_extracted_without_ckptfs(
    tmp_path: Path, rng: random.Random
) -> None:
    with memory_folder() as memory:
        one = Campaign(tmp_path, memory / "store", str(rng.random()), "auto")
        with one.mounted():
            digests = {}
            for number in range(1, MOST_ROUNDS + 1):
                result = one.run_round(number)
                assert result.findings == []
                digests = one.digest_everything() if number >= ROUNDS else {}
                if digests:
                    break
            assert digests, "the rounds made no version"
            one.mount.kill9()
            delete_index(one.store)
            assert rebuild_with_kills(one.store, one.mount.environment, rng, REBUILD_KILLS) > 0
            copy = bare_copy(one.store, memory / "copy")
            one.mount.restart()
            assert one.digest_everything() == digests
            assert one.check_store() == []
            for unit in sorted({unit for unit, _ in digests}):
                assert one.mount.verified(unit)
        listed = extract(copy, "list")
        for unit, version in digests:
            assert version in listed, f"{unit}: extract.py does not list {version}"
        for unit, version in rng.sample(sorted(digests), k=min(EXTRACTED, len(digests))):
            target = memory / "extracted" / unit.replace("/", "-") / version
            target.parent.mkdir(parents=True, exist_ok=True)
            extract(copy, f"{unit}@{version}", str(target))
            assert one.digest_folder(target) == digests[unit, version], (unit, version)


def test_a_store_whose_index_was_deleted_is_refused_until_it_is_rebuilt(
    tmp_path: Path, mount: Mount, rng: random.Random
) -> None:
    """The journal of the last second names a segment; taken for the whole truth it would have recovery
    remove all the others."""
    run = mount.path / "run"
    run.mkdir()
    for number in range(3):
        (run / "model.bin").write_bytes(rng.randbytes(300_000))
        (run / ".versions" / f"save-{number}").mkdir()
    saved = (run / "model.bin").read_bytes()
    mount.kill9()
    before = sorted((mount.store / "segments").rglob("*.*"))
    delete_index(mount.store)
    with pytest.raises(AssertionError, match="rebuild"):
        mount.restart()
    mount.clean_up()
    assert sorted((mount.store / "segments").rglob("*.*")) == before
    mount.cli(*rebuild_command(mount.store)[3:])
    mount.restart()
    assert (run / "model.bin").read_bytes() == saved
    assert len(list((run / ".versions").glob("v0*"))) == 3
    assert mount.verified("run")
