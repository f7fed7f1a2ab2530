"""layout, filesystem: a store is made whole or not at all; what is not understood is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError, Conflict, InvalidRequest, NotFound, Unsupported
from ckptfs.store.filesystem import check_file_system, file_system_at, probe_abilities, refusal
from ckptfs.store.layout import (
    FOLDERS,
    FORMAT_PATH,
    SEALS,
    Format,
    Holder,
    StoreLock,
    add_ro_compat,
    check_format,
    encode_format,
    holder_of,
    open_store,
    read_format,
)


def test_a_store_is_made_once_and_opened_again(tmp_path: Path) -> None:
    root = tmp_path / "a" / "store"
    disk = open_store(str(root), create=True)
    assert {*FOLDERS, FORMAT_PATH} == set(os.listdir(root))
    written = (root / FORMAT_PATH).read_bytes()
    assert written.endswith(b"\n") and written.count(b"\n") == 1
    assert read_format(disk) == Format()
    (root / "segments" / "ab").mkdir()
    assert open_store(str(root), create=True).root == str(root)
    assert (root / FORMAT_PATH).read_bytes() == written


def test_the_format_file_is_golden() -> None:
    assert encode_format(Format()) == (
        b'{"kind":"ckptfs store","version":1,"compat":[],"ro_compat":[],"incompat":[],'
        b'"checksum":"2d41a9be6642b5f2"}\n'
    )


def test_a_format_file_of_before_there_was_a_checksum_is_read(tmp_path: Path) -> None:
    old = b'{"kind":"ckptfs store","version":1,"compat":[],"ro_compat":[],"incompat":[]}\n'
    (tmp_path / FORMAT_PATH).write_bytes(old)
    assert read_format(Disk(str(tmp_path))) == Format()


def test_folders_that_a_backup_left_out_are_made_for_writing_only(tmp_path: Path) -> None:
    (tmp_path / FORMAT_PATH).write_bytes(encode_format(Format()))
    (tmp_path / "segments").mkdir()
    open_store(str(tmp_path), writing=False)
    assert not (tmp_path / "staging").exists()
    open_store(str(tmp_path))
    assert (tmp_path / "staging").is_dir()


@pytest.mark.parametrize("left", [[], ["index"], [*FOLDERS], [*FOLDERS, "format.tmp"], ["lost+found"]])
def test_a_creation_that_died_is_finished(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        path = tmp_path / name
        path.write_bytes(b"half") if "." in name else path.mkdir()
    disk = open_store(str(tmp_path), create=True)
    assert read_format(disk) == Format()


def test_what_is_no_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no store at"):
        open_store(str(tmp_path / "absent"))
    assert not (tmp_path / "absent").exists()
    with pytest.raises(NotFound, match="no format file"):
        open_store(str(tmp_path))
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InvalidRequest, match="not empty and no store"):
        open_store(str(tmp_path), create=True)
    with pytest.raises(InvalidRequest, match="not a folder"):
        open_store(str(tmp_path / "thesis.tex"), create=True)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_store_that_lost_its_format_file_is_not_made_anew(tmp_path: Path) -> None:
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "x.log").write_bytes(b"x")
    with pytest.raises(InvalidRequest, match="without its format file"):
        open_store(str(tmp_path), create=True)


@pytest.mark.parametrize(
    "garbage", [b"", b"\xff\x00", b"{}x", b"[1]", b'{"kind":"zip"}', b'{"version":"1"}', b"9" * 99999]
)
def test_garbage_in_the_format_file_is_one_clear_line(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / FORMAT_PATH).write_bytes(garbage)
    with pytest.raises(InvalidRequest, match="is not the format file") as caught:
        open_store(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_flags_of_the_future() -> None:
    check_format(Format(compat=("sparkles",)), writing=True)
    for writing in (True, False):
        with pytest.raises(Unsupported, match=r"erasure.*needs a newer ckptfs"):
            check_format(Format(incompat=("erasure",)), writing=writing)
        with pytest.raises(Unsupported, match="format 2"):
            check_format(Format(version=2), writing=writing)
    with pytest.raises(Unsupported, match="quotas; to write to it needs a newer ckptfs"):
        check_format(Format(ro_compat=("quotas",)), writing=True)
    check_format(Format(ro_compat=("quotas",)), writing=False)


def test_a_flag_keeps_older_programs_from_writing(tmp_path: Path) -> None:
    disk = open_store(str(tmp_path), create=True)
    (tmp_path / FORMAT_PATH).write_bytes(
        b'{"kind":"ckptfs store","version":1,"compat":["a"],"ro_compat":[],"incompat":[],"made_by":"0.9"}'
    )
    add_ro_compat(disk, SEALS)
    written = (tmp_path / FORMAT_PATH).read_bytes()
    assert written == (
        b'{"kind":"ckptfs store","version":1,"compat":["a"],"ro_compat":["seals"],"incompat":[],'
        b'"made_by":"0.9","checksum":"81c2a78dde4f83a9"}\n'
    )
    add_ro_compat(disk, SEALS)
    assert (tmp_path / FORMAT_PATH).read_bytes() == written
    assert open_store(str(tmp_path)).root == str(tmp_path)


def test_a_refused_store_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / FORMAT_PATH).write_bytes(encode_format(Format(incompat=("erasure",))))
    with pytest.raises(Unsupported):
        open_store(str(tmp_path), create=True)
    assert os.listdir(tmp_path) == [FORMAT_PATH]


def test_unknown_keys_of_the_format_file_are_ignored(tmp_path: Path) -> None:
    (tmp_path / FORMAT_PATH).write_bytes(b'{"kind":"ckptfs store","version":1,"made_by":"0.9"}')
    assert read_format(Disk(str(tmp_path))) == Format()


def test_a_lock_names_its_holder(tmp_path: Path) -> None:
    disk = open_store(str(tmp_path), create=True)
    assert holder_of(disk) is None
    lock = StoreLock(disk, Holder(os.getpid()))
    lock.describe(Holder(os.getpid(), "/mnt/ckpt", "/run/ckptfs/x.sock"))
    with pytest.raises(Conflict, match=f"in use by process {os.getpid()}, mounted at /mnt/ckpt"):
        StoreLock(disk, Holder(1))
    assert holder_of(disk) == Holder(os.getpid(), "/mnt/ckpt", "/run/ckptfs/x.sock")
    lock.release()
    lock.release()
    assert holder_of(disk) is None
    StoreLock(disk, Holder(2)).release()


def test_a_lock_with_garbage_in_it_still_refuses(tmp_path: Path) -> None:
    disk = open_store(str(tmp_path), create=True)
    lock = StoreLock(disk, Holder(os.getpid()))
    (tmp_path / "lock").write_bytes(b"\x00{")
    with pytest.raises(Conflict, match="another process"):
        StoreLock(disk, Holder(1))
    lock.release()


def test_a_dead_process_holds_nothing(tmp_path: Path) -> None:
    disk = open_store(str(tmp_path), create=True)
    script = (
        "import os, sys; from ckptfs.store.layout import *; "
        "lock = StoreLock(open_store(sys.argv[1]), Holder(os.getpid(), '/m')); "
        "print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        with pytest.raises(Conflict, match=f"process {child.pid}, mounted at /m"):
            StoreLock(disk, Holder(1))
        child.kill()
    StoreLock(disk, Holder(1)).release()


MOUNTINFO = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p1 rw
30 22 0:25 / /data rw shared:2 - nfs4 server:/export rw
31 22 0:26 / /mnt/my\\040disk rw - xfs /dev/sdb rw,attr2
32 22 0:27 / /scratch rw master:3 - lustre mgs@tcp:/scratch rw
33 22 0:28 / /home rw - btrfs /dev/sdc rw
34 22 0:29 / /over rw - tmpfs first rw
35 22 0:30 / /over rw - tmpfs second rw
not a mount line
"""


@pytest.mark.parametrize(
    ("path", "device", "expected"),
    [
        ("/", "259:1", ("ext4", "/dev/nvme0n1p1")),
        ("/database", "259:1", ("ext4", "/dev/nvme0n1p1")),
        ("/data", "0:25", ("nfs4", "server:/export")),
        ("/data/a/b", "0:25", ("nfs4", "server:/export")),
        ("/mnt/my disk/store", "0:26", ("xfs", "/dev/sdb")),
        ("/home/me", "0:99", ("btrfs", "/dev/sdc")),
        ("/over/x", "0:30", ("tmpfs", "second")),
        ("/scratch", "259:1", ("ext4", "/dev/nvme0n1p1")),
    ],
)
def test_the_mount_of_a_path(path: str, device: str, expected: tuple[str, str]) -> None:
    assert file_system_at(MOUNTINFO.splitlines(), path, device) == expected


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("nfs", "s:/e"), ("nfs4", "s:/e"), ("lustre", "m"), ("cifs", "//s"), ("smb3", "//s"), ("ceph", "m"),
        ("fuse.glusterfs", "g"), ("fuse.sshfs", "h:"), ("fuse.ckptfs", "x"), ("fuse", "ckptfs"),
    ],
)  # fmt: skip
def test_network_mounts_and_our_own_are_refused(kind: str, source: str) -> None:
    assert refusal(kind, source)


@pytest.mark.parametrize(
    "kind", ["ext4", "xfs", "btrfs", "tmpfs", "zfs", "overlay", "9p", "fuse.fuse-overlayfs", ""]
)
def test_local_mounts_are_not(kind: str) -> None:
    assert refusal(kind, "/dev/sda") is None


def test_a_store_to_be_made_is_judged_by_the_folder_above(tmp_path: Path) -> None:
    check_file_system(str(tmp_path / "not" / "yet"))


def test_probe_leaves_nothing_behind_and_repeats(tmp_path: Path) -> None:
    disk = open_store(str(tmp_path), create=True)
    (tmp_path / "staging" / "probe.tmp").write_bytes(b"left by a probe that died")
    abilities = probe_abilities(disk)
    assert abilities == probe_abilities(disk)
    assert os.listdir(tmp_path / "staging") == os.listdir(tmp_path / "segments") == []


class BareDisk(Disk):
    """A file system without the finer abilities."""

    def punch(self, fd: int, offset: int, length: int) -> bool:
        return False

    def data_extents(self, fd: int, size: int) -> list[tuple[int, int]]:
        return [(0, size)]

    def lease(self, fd: int, kind: object) -> bool:
        raise OSError(22, "Invalid argument")


def test_what_is_missing_is_found_out(tmp_path: Path) -> None:
    open_store(str(tmp_path), create=True)
    abilities = probe_abilities(BareDisk(str(tmp_path)))
    assert not (abilities.punch or abilities.seek_data or abilities.leases)


def test_no_store_without_hard_links(tmp_path: Path) -> None:
    class NoLinks(Disk):
        def link(self, source: str, target: str) -> None:
            raise OSError(1, "Operation not permitted")

    open_store(str(tmp_path), create=True)
    with pytest.raises(Unsupported, match="no hard links"):
        probe_abilities(NoLinks(str(tmp_path)))
    assert os.listdir(tmp_path / "staging") == []


def test_any_bytes_are_a_format_or_one_clear_error(tmp_path: Path, rng: object) -> None:
    import random

    assert isinstance(rng, random.Random)
    whole = encode_format(Format(incompat=("a",)))
    for _ in range(300):
        mutated = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        (tmp_path / FORMAT_PATH).write_bytes(mutated)
        try:
            check_format(read_format(Disk(str(tmp_path))), writing=True)
        except CkptfsError as e:
            assert "\n" not in str(e)
    assert msgspec.json.decode(whole, type=Format).incompat == ("a",)
