"""What becomes a version, and what a destructive call cannot take away."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from asking import let_settle
from kernelmounts import poll
from mounting import Mount

SETTLE_S = 1
HUGE_BYTES = 2**63 - 1 - 2**20


@pytest.fixture(params=["auto", "plain"])
def place(request: pytest.FixtureRequest, mount_factory: Callable[..., Mount]) -> Mount:
    """A mount that settles fast, on each write path."""
    return mount_factory(config={"settle_s": SETTLE_S, "write_path": request.param})


def files_of(directory: Path) -> dict[str, bytes]:
    """Every regular file below a directory by relative path."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def newest(mount: Mount, unit: str) -> Path:
    return mount.history(unit) / mount.versions(unit)[-1].name


@pytest.fixture
def held_back(place: Mount) -> Iterator[tuple[Mount, Path]]:
    """A run whose directory is never quiet, because a file in it is being written."""
    run = place.path / "run"
    run.mkdir()
    with (run / "slow.bin").open("wb", buffering=0) as slow:
        slow.write(b"\x00\x01binary")
        yield place, run


def test_a_closed_file_is_in_a_version_after_settle_s(place: Mount) -> None:
    run = place.path / "run"
    run.mkdir()
    (run / "a").write_bytes(b"one" * 100_000)
    place.wait_for_version("run", lambda version: version.number == 1)
    assert files_of(newest(place, "run")) == {"a": b"one" * 100_000}


@pytest.mark.parametrize("how", ["unlink", "truncate", "rename-over", "cut"])
def test_settled_content_that_no_version_holds_survives_its_destruction(
    held_back: tuple[Mount, Path], how: str
) -> None:
    mount, run = held_back
    saved = os.urandom(300_000)
    (run / "save").write_bytes(saved)
    let_settle(SETTLE_S)
    assert not mount.versions("run")
    if how == "unlink":
        (run / "save").unlink()
    elif how == "truncate":
        (run / "save").write_bytes(b"new")
    elif how == "cut":
        os.truncate(run / "save", 1000)
    else:
        (run / "other").write_bytes(b"other")
        (run / "other").rename(run / "save")
    version = mount.wait_for_version("run", lambda version: True)
    kept = (mount.history("run") / version.name / "save").read_bytes()
    assert hashlib.sha256(kept).digest() == hashlib.sha256(saved).digest()


def test_one_settled_state_makes_one_pre_image_however_many_files_are_removed(
    held_back: tuple[Mount, Path],
) -> None:
    mount, run = held_back
    saved = {f"part{n}": os.urandom(5000 + n) for n in range(50)}
    for name, content in saved.items():
        (run / name).write_bytes(content)
    let_settle(SETTLE_S)
    for name in saved:
        (run / name).unlink()
    mount.wait_for_version("run", lambda version: True)
    mount.publish("run")
    whole = [name for name in mount.version_names("run") if files_of(mount.history("run") / name) == saved]
    assert len(whole) == 1
    assert len(mount.version_names("run")) <= 2


def test_a_removed_run_can_be_read_under_its_name(place: Mount) -> None:
    run = place.path / "run"
    (run / "deep/er").mkdir(parents=True)
    (run / "deep/er/file").write_bytes(b"kept")
    place.wait_for_version("run", lambda version: True)
    shutil.rmtree(run)
    assert not run.exists()
    versions = sorted(place.history("run").glob("v0*"))
    assert (versions[0] / "deep/er/file").read_bytes() == b"kept"


def test_a_run_removed_before_its_first_version_leaves_a_pre_image(held_back: tuple[Mount, Path]) -> None:
    mount, _ = held_back
    gone = mount.path / "gone"
    gone.mkdir()
    with (gone / "open.bin").open("wb", buffering=0) as slow:
        slow.write(b"\x00\x01binary")
        (gone / "save").write_bytes(b"precious")
        let_settle(SETTLE_S)
        shutil.rmtree(gone)
    version = mount.wait_for_version("gone", lambda version: True)
    assert (mount.history("gone") / version.name / "save").read_bytes() == b"precious"


def test_history_follows_a_renamed_run_and_a_made_again_name_goes_on(place: Mount) -> None:
    old, new = place.path / "old", place.path / "new"
    old.mkdir()
    (old / "a").write_bytes(b"first")
    place.wait_for_version("old", lambda version: version.number == 1)
    old.rename(new)
    assert place.versions("new")[0].number == 1
    shutil.rmtree(new)
    new.mkdir()
    (new / "b").write_bytes(b"second")
    place.wait_for_version("new", lambda version: (place.history("new") / version.name / "b").exists())
    numbers = [version.number for version in place.versions("new")]
    assert numbers == sorted(set(numbers)) and len(numbers) >= 2
    assert (place.history("new") / place.versions("new")[0].name / "a").read_bytes() == b"first"


def test_units_can_lie_deeper(mount_factory: Callable[..., Mount]) -> None:
    mount = mount_factory(config={"settle_s": SETTLE_S, "units": ["/*/*"]})
    for name in ("team/one", "team/two"):
        (mount.path / name).mkdir(parents=True)
        (mount.path / name / "a").write_bytes(name.encode())
    (mount.path / "team/notes").write_bytes(b"of the team")
    for name in ("one", "two"):
        directory = mount.path / "team" / name
        history = mount.path / ".versions" / f"team%2F{name}"
        mount.cli("publish", str(directory))
        latest = sorted(history.glob("v0*"))[-1]
        assert files_of(latest) == {"a": f"team/{name}".encode()}
    mount.cli("publish", str(mount.path / "team"))
    assert files_of(newest(mount, "team")) == {"notes": b"of the team"}


def test_versions_can_be_switched_off(place: Mount) -> None:
    run = place.path / "run"
    (run / "scratch").mkdir(parents=True)
    os.setxattr(run / "scratch", "user.ckptfs.versions", b"off")
    (run / "scratch/tmp").write_bytes(b"not kept")
    (run / "a").write_bytes(b"kept")
    place.wait_for_version("run", lambda version: True)
    assert files_of(newest(place, "run")) == {"a": b"kept"}


def test_what_has_no_versions_is_stored_all_the_same(place: Mount) -> None:
    scratch = place.path / "scratch"
    scratch.mkdir()
    os.setxattr(scratch, "user.ckptfs.versions", b"off")
    (scratch / "tmp").write_bytes(b"deduplicated" * 50_000)

    def is_stored() -> bool:
        try:
            return bool(os.getxattr(scratch / "tmp", "user.ckptfs.cid"))
        except OSError:
            return False

    assert poll(is_stored, 60)
    assert not place.versions("scratch")


def test_a_snapshot_has_the_name_it_was_made_with(place: Mount) -> None:
    run = place.path / "run"
    run.mkdir()
    (run / "a").write_bytes(b"now")
    (run / ".versions/before-change").mkdir()
    assert (run / ".versions/before-change").is_symlink()
    assert files_of(run / ".versions/before-change") == {"a": b"now"}
    with pytest.raises(FileExistsError):
        (run / ".versions/before-change").mkdir()
    with pytest.raises(OSError, match="Invalid argument"):
        (run / ".versions/step-5").mkdir()


def test_a_version_shows_everything_as_it_was(place: Mount) -> None:
    run = place.path / "run"
    run.mkdir(mode=0o750)
    (run / "a").write_bytes(b"linked" * 50_000)
    os.link(run / "a", run / "b")
    os.symlink("a", run / "link")
    os.mkfifo(run / "fifo", 0o640)
    os.setxattr(run / "a", "user.note", b"hello")
    os.chmod(run / "a", 0o604)
    os.utime(run / "a", ns=(1_111_111_111_222_222_222, 1_333_333_333_444_444_444))
    with (run / "sparse").open("wb") as sparse:
        sparse.truncate(50 << 20)
        sparse.seek(20 << 20)
        sparse.write(b"middle")
    place.publish("run")
    saved = newest(place, "run")
    assert stat.S_IMODE(saved.stat().st_mode) == 0o750
    shown, live = (saved / "a").stat(), (run / "a").stat()
    assert (shown.st_mode, shown.st_mtime_ns, shown.st_size) == (live.st_mode, live.st_mtime_ns, live.st_size)
    assert (saved / "a").samefile(saved / "b") and shown.st_nlink == 2
    assert os.readlink(saved / "link") == "a"
    assert stat.S_ISFIFO((saved / "fifo").lstat().st_mode)
    assert os.getxattr(saved / "a", "user.note") == b"hello"
    assert (saved / "sparse").stat().st_blocks * 512 < 1 << 20
    compared = subprocess.run(
        ["diff", "-r", "--no-dereference", "-x", "fifo", str(run), str(saved)],
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert compared.returncode == 0, compared.stdout


def test_an_appended_log_is_in_the_version_of_the_save_beside_it(place: Mount) -> None:
    run = place.path / "run"
    run.mkdir()
    with (run / "train.log").open("a", buffering=1) as log:
        log.write("step 1\n")
        (run / "save.bin").write_bytes(os.urandom(200_000))
        first = place.wait_for_version(
            "run", lambda version: (place.history("run") / version.name / "save.bin").exists()
        )
        log.write("step 2\n")
        (run / "save.bin").write_bytes(os.urandom(200_000))
        second = place.wait_for_version("run", lambda version: version.number > first.number)
    logs = [(place.history("run") / v.name / "train.log").read_text() for v in (first, second)]
    assert logs == ["step 1\n", "step 1\nstep 2\n"]


def test_a_log_that_is_cut_while_it_is_open_is_never_listed_as_a_mixture(place: Mount) -> None:
    """What is behind the cut is new, or the file is listed as it was last published."""
    run = place.path / "run"
    run.mkdir()
    before = b"before the cut\n" * 4000
    with (run / "train.log").open("ab", buffering=0) as log:
        log.write(before)
        (run / "save").write_bytes(b"a save")
        place.publish("run")
        is_listed = (newest(place, "run") / "train.log").exists()
        os.truncate(run / "train.log", 0)
        for _ in range(60):
            log.write(b"behind it\n" * 300)
        (run / "save").write_bytes(b"another save")
        place.publish("run")
        live = (run / "train.log").read_bytes()
    assert is_listed and len(live) > len(before)
    saved = (newest(place, "run") / "train.log").read_bytes()
    assert hashlib.sha256(saved).digest() in {hashlib.sha256(b).digest() for b in (live, before)}


def test_a_large_run_on_an_empty_disk_costs_no_history(mount_factory: Callable[..., Mount]) -> None:
    """The size of a run, or of a sparse file, says nothing about the room that the next save needs."""
    mount = mount_factory(config={"settle_s": SETTLE_S, "min_free": "1MiB"})
    for unit in ("a", "huge"):
        (mount.path / unit).mkdir()
    for number in range(3):
        (mount.path / "a/file").write_bytes(b"%d" % number * 1000)
        mount.publish("a")
    with (mount.path / "huge/sparse").open("wb") as sparse:
        sparse.truncate(1 << 43)
    mount.publish("huge")
    (mount.path / "a/other").write_bytes(b"new")
    assert len(mount.versions("a")) == 3


def test_a_snapshot_has_what_was_closed_just_before_it(place: Mount) -> None:
    """The kernel lets go of a file a moment after its close, and the snapshot waits for that."""
    run = place.path / "run"
    run.mkdir()
    for number in range(40):
        content = b"%d" % number * 50_000
        (run / "save").write_bytes(content)
        (run / f".versions/snapshot{number}").mkdir()
        assert (run / f".versions/snapshot{number}/save").read_bytes()[:20] == content[:20]


@pytest.mark.parametrize("write_path", ["auto", "plain"])
def test_huge_sparse_files_and_odd_times_are_published(
    mount_factory: Callable[..., Mount], write_path: str
) -> None:
    place = mount_factory(config={"settle_s": SETTLE_S, "write_path": write_path}, on_tmpfs=True)
    run = place.path / "run"
    run.mkdir()
    for name in ("a", "b", "c"):
        (run / name).touch()
        os.truncate(run / name, HUGE_BYTES)
        os.utime(run / name, ns=(-(2**40) * 10**9, 2**40 * 10**9))
    place.publish("run")
    saved, live = newest(place, "run"), run
    for name in ("a", "b", "c"):
        assert (saved / name).stat().st_size == (live / name).stat().st_size
        assert (saved / name).stat().st_mtime_ns == (live / name).stat().st_mtime_ns


@pytest.mark.parametrize("write_path", ["auto", "plain"])
@pytest.mark.parametrize("how", ["rename", "tracker"])
def test_a_committed_save_that_is_rotated_away_at_once_is_kept(
    mount_factory: Callable[..., Mount], write_path: str, how: str
) -> None:
    """While a version of an earlier save is still being made: a large file beside it takes a while."""
    place = mount_factory(config={"settle_s": 30, "write_path": write_path}, on_tmpfs=True)
    run = place.path / "run"
    run.mkdir()
    with (run / "large").open("wb") as large:
        for _ in range(96):
            large.write(os.urandom(1 << 20))
    saved = {}
    for step in range(1, 7):
        save = run / (f"tmp-{step}" if how == "rename" else f"checkpoint-{step}")
        save.mkdir()
        saved[f"checkpoint-{step}"] = {"model": os.urandom(200_000), "small": b"%d" % step}
        for name, content in saved[f"checkpoint-{step}"].items():
            (save / name).write_bytes(content)
        if how == "rename":
            save.rename(run / f"checkpoint-{step}")
        else:
            (save / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
        if step > 1:
            shutil.rmtree(run / f"checkpoint-{step - 1}")
    place.publish("run")
    found: dict[str, dict[str, bytes]] = {}
    for version in sorted(place.history("run").glob("v0*")):
        for save in version.glob("checkpoint-*"):
            whole = {
                name: content for name, content in files_of(save).items() if name != "trainer_state.json"
            }
            if {*map(len, whole.values())} == {*map(len, saved[save.name].values())}:
                found[save.name] = whole
    assert found.keys() == saved.keys()
    assert all(digests(found[name]) == digests(saved[name]) for name in saved)


def digests(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
