"""Hard links across a directory that was busy and one that was not: found by kill9.py's rebuild test.

Such a version lists the busy directory as it was last published, so two names of one live file may have
different bytes in it. Each name must give its own, on the mount and from extract.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kernelmounts import poll
from mounting import Mount
from rebuilding import bare_copy, extract

OLD, NEW = b"old" * 1000, b"new"
SETTLE_S = 1.0


def test_two_names_that_differ_in_a_version_are_not_taken_for_one_file(
    mount_factory: Callable[..., Mount], tmp_path: Path
) -> None:
    mount = mount_factory(config={"settle_s": SETTLE_S, "settle_max_s": 60}, on_tmpfs=True)
    run = mount.path / "run"
    (run / "sub").mkdir(parents=True)
    (run / "sub" / "model.bin").write_bytes(OLD)
    os.link(run / "sub" / "model.bin", run / "other.bin")
    (run / ".versions" / "before").mkdir()
    (run / "sub" / "model.bin").write_bytes(NEW)

    def keep_busy() -> str | None:
        """Something happens in `run` all the time, so only `sub` becomes quiet."""
        (run / "beat").touch()
        newest = mount.version_names("run")[-1]
        changed = (mount.history("run") / newest / "sub" / "model.bin").stat().st_size == len(NEW)
        return newest if changed else None

    version = poll(keep_busy, 20, every_s=SETTLE_S / 10)
    assert version is not None, "no version of the quiet directory"
    mixed = mount.history("run") / version
    for _ in range(2):
        assert (mixed / "sub" / "model.bin").read_bytes() == NEW
        assert (mixed / "other.bin").read_bytes() == OLD
        assert (mixed / "sub" / "model.bin").stat().st_size == len(NEW)
    mount.stop()
    extract(bare_copy(mount.store, tmp_path / "copy"), f"run@{version}", str(tmp_path / "out"))
    assert (tmp_path / "out" / "other.bin").read_bytes() == OLD
    assert (tmp_path / "out" / "sub" / "model.bin").read_bytes() == NEW
