"""Ranks that hold parts of tensors: two gloo processes, against a whole file and against their own DCP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from clients.clientproc import named, run_ranks
from mounting import Mount

CHUNK = 256 << 10
ROW_BYTES = 512 * 4
# Name: flipped row of each rank's, bytes of a row, rows of each rank.
FLIPPED = {
    "aligned": (200, ROW_BYTES, (512, 512)),
    "unaligned": (499, 513 * 4, (500, 500)),
    "uneven": (1, 70_000 * 4, (3, 2)),
}


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
        assert found["plain"] == {
            "aligned": "verified",
            "unaligned": "verified",
            "uneven": "verified",
            # The second rank holds nothing of a single row.
            "one_row": "verified",
            "columns": "column shard",
            "everywhere": "partial sum",
        }, rank
        # Rows 0 to 511 of `aligned` are 4 chunks; those of `unaligned` end within one.
        assert found["anybody"] == {name: "verified" for name in found["anybody"]} | {
            "unaligned": "shard ends within a chunk",
            "uneven": "shard ends within a chunk",
            "columns": "column shard",
        }
        # What a rank has saved by itself is a file's block, whatever its edges; so are columns.
        assert set(found["same"].values()) == {"verified"}, (rank, found["same"])
        # One who holds all of it can verify the rows of all ranks, but not columns.
        assert found["gathered"] == {name: "verified" for name in found["same"]} | {"columns": "column shard"}
        for form in ("whole.safetensors", "dcp"):
            rows = {one["name"]: one for one in reports[form]}
            assert {name for name, one in rows.items() if one["status"] == "corrupt"} == set(FLIPPED), form
            (bad,) = rows["aligned"]["corrupt"]
            assert (bad["offset"], bad["length"]) == (200 * ROW_BYTES // CHUNK * CHUNK, CHUNK)
            for name, (row, row_bytes, held_rows) in FLIPPED.items():
                (bad,) = rows[name]["corrupt"]
                at = row * row_bytes + 7 * 4
                assert bad["offset"] <= at < bad["offset"] + bad["length"] <= held_rows[rank] * row_bytes
