"""Ranks that hold parts of tensors: two gloo processes, against a whole file and against their own DCP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from clients.clientproc import named, run_ranks
from mounting import Mount

ROW_BYTES = 512 * 4
FLIPPED = 200 * ROW_BYTES // (256 << 10) * (256 << 10)


def test_each_rank_verifies_what_it_holds(mount_factory: Callable[..., Mount], tmp_path: Path) -> None:
    mount = mount_factory(on_tmpfs=True)
    run = mount.path / "run"
    run.mkdir()
    environment = {"HOME": mount.environment["HOME"]}
    said = run_ranks("verify_rank.py", str(run), str(tmp_path / "rendezvous"), environment=environment)
    (answer,) = named(said, "verified")
    for rank, reports in enumerate(cast("list[dict[str, list[dict[str, Any]]]]", answer["ranks"])):
        found = {
            form: {one["name"]: one["reason"] or one["status"] for one in rows}
            for form, rows in reports.items()
        }
        # Rows 0 to 511 of `aligned` are 4 chunks; those of `unaligned` end within one.
        assert found["plain"] == {
            "aligned": "verified",
            "unaligned": "shard ends within a chunk",
            "uneven": "shard ends within a chunk",
            # The second rank holds nothing of a single row.
            "one_row": "verified",
            "columns": "column shard",
            "everywhere": "partial sum",
        }, rank
        # What a rank has saved by itself is a file's block, whatever its edges; so are columns.
        assert set(found["same"].values()) == {"verified"}, (rank, found["same"])
        # One who holds all of it can verify the rows of all ranks, but not columns.
        assert found["gathered"] == {name: "verified" for name in found["same"]} | {"columns": "column shard"}
        for form in ("whole.safetensors", "dcp"):
            rows = {one["name"]: one for one in reports[form]}
            assert rows["aligned"]["status"] == "corrupt", (rank, form)
            (bad,) = rows["aligned"]["corrupt"]
            assert (bad["offset"], bad["length"]) == (FLIPPED, 256 << 10)
            assert [name for name, one in rows.items() if one["status"] == "corrupt"] == ["aligned"]
