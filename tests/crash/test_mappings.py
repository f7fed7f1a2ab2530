"""Files that somebody has mapped after closing them: never adopted while they are written, never punched.

RELEASE does not say that the last user is gone (KERNEL_NOTES.md); under passthrough a mapping goes on
writing to the staging file itself, also after the daemon's death.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest
from asking import let_settle
from kernelmounts import poll
from mounting import Mount, may_pass_through

SETTLE_S = 0.3
SIZE = 1 << 20
ANSWER_S = 30.0
MAPPER = Path(__file__).with_name("mapper.py")
MountFactory = Callable[..., Mount]


class Mapper:
    """A running mapper.py. Owned by the test."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(MAPPER), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> Self:
        assert self._answer() == "mapped"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=ANSWER_S)

    def ask(self, question: str) -> str:
        """The hash of what its mapping shows."""
        assert self._process.stdin is not None
        self._process.stdin.write(question + "\n")
        return self._answer()

    def stop(self) -> str:
        """The last hash; the mapping is gone when this returns."""
        said = self.ask("stop")
        assert self._process.wait(ANSWER_S) == 0
        return said

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, f"the mapper ended with {self._process.wait(ANSWER_S)}"
        return line


@pytest.fixture(params=["auto", "plain"])
def mapped_mount(request: pytest.FixtureRequest, mount_factory: MountFactory) -> Mount:
    """A mount in memory that settles quickly, on each of the two write paths."""
    config = {"settle_s": SETTLE_S, "settle_max_s": 1.0, "write_path": request.param}
    return mount_factory(config=config, on_tmpfs=True)


def test_a_file_that_is_written_through_a_mapping_is_adopted_only_after_it(mapped_mount: Mount) -> None:
    run = mapped_mount.path / "run"
    run.mkdir()
    with Mapper("write", str(run / "model.bin"), str(SIZE)) as writer:
        (run / "config.json").write_text("{}")
        for tag in ("first", "second"):
            let_settle(SETTLE_S)
            (run / ".versions" / tag).mkdir()
            writer.ask("check")
            assert not is_stored(run / "model.bin"), "adopted under the hands of its writer"
            assert "model.bin" not in os.listdir(run / ".versions" / tag), (
                "a version lists a file in the making"
            )
        assert mapped_links(mapped_mount.store, SIZE) == {1}, "the staging file has a second name"
        last = writer.stop()
    assert poll(lambda: is_stored(run / "model.bin"), ANSWER_S), "never stored after its writer had gone"
    assert digest(run / "model.bin") == last
    (run / ".versions" / "third").mkdir()
    assert digest(run / ".versions" / "third" / "model.bin") == last
    assert mapped_mount.verified("run")


@pytest.mark.skipif(not may_pass_through(), reason="without passthrough a mapping ends with its daemon")
def test_a_mapping_that_outlives_the_daemon_keeps_its_file_from_being_adopted(
    mount_factory: MountFactory,
) -> None:
    mount = mount_factory(config={"settle_s": SETTLE_S, "settle_max_s": 1.0}, on_tmpfs=True)
    assert mount.facts("status", str(mount.path))["write_path"] == "passthrough"
    run = mount.path / "run"
    run.mkdir()
    with Mapper("write", str(run / "model.bin"), str(SIZE)) as writer:
        mount.kill9()
        mount.restart()
        (run / "config.json").write_text("{}")
        let_settle(SETTLE_S)
        (run / ".versions" / "between").mkdir()
        writer.ask("check")
        assert not is_stored(run / "model.bin")
        last = writer.stop()
    # A refused lease is asked for again after half a minute, or when something else happens there.
    (run / "done").touch()
    assert poll(lambda: is_stored(run / "model.bin"), ANSWER_S)
    assert digest(run / "model.bin") == last
    assert mount.verified("run")


def test_what_somebody_has_mapped_is_not_punched(mapped_mount: Mount, rng: random.Random) -> None:
    """The second file shares its first half with the first one, so half of it is given back to the disk.

    A reader that came while the file was written has the staging file itself mapped (under passthrough
    the kernel gives every opener of a file the same way), and keeps it whole as long as it is there.
    """
    run, store = mapped_mount.path / "run", mapped_mount.store
    passes = mapped_mount.facts("status", str(mapped_mount.path))["write_path"] == "passthrough"
    run.mkdir()
    shared = rng.randbytes(2 * SIZE)
    (run / "first.bin").write_bytes(shared)
    assert poll(lambda: is_stored(run / "first.bin"), ANSWER_S)
    content = shared + rng.randbytes(2 * SIZE)
    with contextlib.ExitStack() as stack:
        with (run / "second.bin").open("wb") as f:
            f.write(content)
            f.flush()
            early = stack.enter_context(Mapper("read", str(run / "second.bin")))
        late = stack.enter_context(Mapper("read", str(run / "second.bin")))
        let_settle(SETTLE_S)
        for _ in range(3):
            let_settle(1.0)
            assert early.ask("check") == late.ask("check") == digest_of(content)
        if passes:
            # A file that somebody reads by passthrough may wait with being stored at all.
            assert allocated(store, len(content)) == [len(content)], "punched under somebody's mapping"
        assert early.stop() == late.stop() == digest_of(content)
    (run / "done").touch()
    assert poll(lambda: is_stored(run / "second.bin"), ANSWER_S)
    # It was adopted and punched, or, as what somebody has open, copied without what was there already.
    assert poll(lambda: occupied(store) <= len(content) + SIZE // 2, ANSWER_S), (
        "the shared half is kept twice"
    )
    assert digest(run / "second.bin") == digest_of(content)
    assert mapped_mount.verified("run")


def test_a_process_that_maps_a_segment_keeps_it_from_being_punched(
    mapped_mount: Mount, rng: random.Random
) -> None:
    """The same for a mapping of the segment itself, which is what a passthrough reader has."""
    run, store = mapped_mount.path / "run", mapped_mount.store
    run.mkdir()
    shared = rng.randbytes(2 * SIZE)
    (run / "first.bin").write_bytes(shared)
    assert poll(lambda: is_stored(run / "first.bin"), ANSWER_S)
    content = shared + rng.randbytes(2 * SIZE)
    with contextlib.ExitStack() as stack:
        with (run / "second.bin").open("wb") as f:
            f.write(content)
            [staged] = [path for path in (store / "staging").iterdir() if path.stat().st_size == len(content)]
            reader = stack.enter_context(Mapper("read", str(staged)))
        assert poll(lambda: is_stored(run / "second.bin"), ANSWER_S)
        let_settle(3.0)
        assert reader.ask("check") == digest_of(content), "punched under somebody's mapping"
        assert digest(run / "second.bin") == digest_of(content)
        reader.stop()
    assert poll(lambda: allocated(store, len(content))[0] <= len(content) * 3 // 4, ANSWER_S), "never punched"
    assert digest(run / "second.bin") == digest_of(content)


def is_stored(path: Path) -> bool:
    """Whether the store holds the file: only then it has a CID."""
    try:
        return bool(os.getxattr(path, "user.ckptfs.cid"))
    except OSError:
        return False


def mapped_links(store: Path, size: int) -> set[int]:
    """How many names the staging files of this size have."""
    return {path.stat().st_nlink for path in (store / "staging").iterdir() if path.stat().st_size == size}


def allocated(store: Path, size: int) -> list[int]:
    """The bytes that each staging file and segment of this length really occupies."""
    found = {}
    for path in [*(store / "segments").rglob("*.seg"), *(store / "staging").iterdir()]:
        with contextlib.suppress(FileNotFoundError):  # adopted or dropped meanwhile
            status = path.stat()
            if status.st_size == size:
                found[status.st_ino] = status.st_blocks * 512
    return list(found.values())


def occupied(store: Path) -> int:
    """The bytes that all staging files and segments really occupy."""
    paths = [*(store / "segments").rglob("*.seg"), *(store / "staging").iterdir()]
    return sum(path.stat().st_blocks * 512 for path in paths if path.exists())


def digest(path: Path) -> str:
    return digest_of(path.read_bytes())


def digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
