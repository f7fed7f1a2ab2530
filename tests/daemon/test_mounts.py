"""The mount table, and following a path up to a mount point but never into it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptfs.daemon import mounts
from ckptfs.daemon.mounts import MountEntry, find_mounted, follow, mount_at, mount_over, parse_mountinfo
from ckptfs.store.errors import InvalidRequest, NotFound

TABLE = rb"""21 26 0:20 / /proc rw,relatime - proc proc rw
26 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 26 0:43 / /mnt/ckpt rw,nosuid,nodev - fuse.ckptfs ckptfs rw,user_id=1000,group_id=7,allow_other
41 26 0:44 / /mnt/with\040blank\134 rw master:2 propagate_from:1 - fuse.ckptfs ckptfs rw,user_id=0,group_id=0
42 40 0:45 / /mnt/ckpt/other rw - tmpfs none rw
43 26 0:46 / /twice rw - tmpfs below rw
44 43 0:47 / /twice rw - fuse.ckptfs above rw
torn line
"""


def table_of(*paths: Path) -> list[MountEntry]:
    return [
        MountEntry("/", "ext4", "/dev/x", 1),
        *(MountEntry(str(p), "fuse.ckptfs", "ckptfs", 2) for p in paths),
    ]


def test_parsing() -> None:
    table = parse_mountinfo(TABLE)
    assert len(table) == 7
    ckpt = mount_at("/mnt/ckpt", table)
    assert ckpt == MountEntry("/mnt/ckpt", "fuse.ckptfs", "ckptfs", 43, user_id=1000, allow_other=True)
    blank = mount_at("/mnt/with blank\\", table)
    assert blank is not None and blank.is_ckptfs and not blank.allow_other
    assert mount_at("/mnt", table) is None


def test_the_longest_mount_wins_and_the_last_one_is_on_top() -> None:
    table = parse_mountinfo(TABLE)
    assert mount_over("/mnt/ckpt/run/x", table).path == "/mnt/ckpt"
    assert mount_over("/mnt/ckpt/other/x", table).file_system == "tmpfs"
    assert mount_over("/mnt/ckptx", table).path == "/"
    assert mount_over("/twice", table).source == "above"
    with pytest.raises(NotFound):
        mount_over("/x", [])


def test_links_are_followed_up_to_the_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = tmp_path / "mnt"
    point.mkdir()
    (point / "inside").symlink_to("/nowhere")
    (tmp_path / "link").symlink_to("mnt")
    (tmp_path / "far").symlink_to(tmp_path / "link" / "run")
    table = table_of(point)
    assert follow(f"{tmp_path}/link/run", table) == f"{point}/run"
    assert follow(f"{tmp_path}/far/x", table) == f"{point}/run/x"
    assert follow(f"{point}/inside", table) == f"{point}/inside"
    assert follow(f"{point}/a/../b/.", table) == f"{point}/b"
    assert follow(f"{point}/../link/c", table) == f"{point}/c"
    monkeypatch.chdir(tmp_path)
    assert follow("link//run/", table) == f"{point}/run"
    assert follow("absent/x", table) == f"{tmp_path}/absent/x"


def test_no_mount_is_ever_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = str(tmp_path / "mnt")
    touched: list[str] = []
    real = os.lstat

    def watched(path: str) -> os.stat_result:
        touched.append(path)
        return real(path)

    monkeypatch.setattr(mounts.os, "lstat", watched)
    follow(f"{point}/run/x", table_of(Path(point)))
    assert touched and not any(mounts.is_below(path, point) for path in touched)


def test_loops_and_nonsense_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(InvalidRequest, match="too many"):
        follow(f"{tmp_path}/a", table_of())
    with pytest.raises(InvalidRequest, match="zero byte"):
        follow("/a\0b", table_of())


def test_a_path_on_no_mount_of_ours(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="not on a ckptfs mount"):
        find_mounted(str(tmp_path))
