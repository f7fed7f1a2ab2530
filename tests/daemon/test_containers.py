"""Mounts as containers see them: a mount namespace with its mounts as slaves stands in for one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernelmounts import poll
from mounting import Mount

EXAMPLES = Path(__file__).parents[2] / "examples"


class Container:
    """A shell in a mount namespace of its own; it runs until `end`."""

    def __init__(self, propagation: str = "slave") -> None:
        self._process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", propagation, "sh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        assert self.run("echo started") == "started"

    def run(self, command: str) -> str:
        """What a command says, in one line."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"timeout 30 {command} 2>&1 | tr '\\n' ' '; echo\n")
        return stdout.readline().strip()

    def end(self) -> None:
        self._process.communicate("exit\n", timeout=30)


@pytest.fixture
def shared_folder(tmp_path: Path) -> Iterator[Path]:
    """A mount that is shared, as / is where systemd runs."""
    folder = tmp_path / "mnt"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "ckptfs-test", str(folder)], check=True, timeout=30)
    try:
        subprocess.run(["mount", "--make-shared", str(folder)], check=True, timeout=30)
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


def test_a_mount_is_seen_in_containers_that_run_already(shared_folder: Path, tmp_path: Path) -> None:
    """Made after the container was started, and made again after a crash."""
    container = Container()
    mount = Mount(shared_folder / "ckpt", tmp_path / "store", logs=tmp_path / "logs")
    try:
        with mount:
            file = mount.path / "run" / "file"
            file.parent.mkdir()
            file.write_bytes(b"saved")
            assert container.run(f"cat {file}") == "saved"
            (rows,) = [row for row in _doctor(mount) if row.startswith("  containers")]
            assert "rslave" in rows
            mount.kill9()
            assert "not connected" in container.run(f"cat {file}")
            mount.start()
            assert container.run(f"cat {file}") == "saved"
            assert container.run(f"sh -c 'echo more > {file.parent}/other'") == ""
            assert (file.parent / "other").read_bytes() == b"more\n"
        poll(lambda: container.run(f"ls {mount.path}") == "", 30)
    finally:
        mount.clean_up()
        container.end()


@pytest.mark.parametrize("by_command", [False, True], ids=["SIGTERM", "umount"])
def test_a_stop_does_not_wait_for_a_container_that_keeps_the_mount_to_itself(
    tmp_path: Path, by_command: bool
) -> None:
    """Such a one (its mounts are private, as Docker's are) does not lose the mount with the host, so the
    session does not end by itself."""
    mount = Mount(tmp_path / "mnt", tmp_path / "store", logs=tmp_path / "logs")
    container: Container | None = None
    try:
        with mount:
            file = mount.path / "file"
            file.write_bytes(b"saved")
            container = Container("private")
            if by_command:
                done = mount.cli("umount", str(mount.path), check=False)
                assert done.returncode == 1 and "sh (process " in done.stderr, done.stderr
                assert container.run(f"cat {file}") == "saved", "the daemon goes on for it"
                assert not os.listdir(mount.path)
            mount.stop()
            assert "not connected" in container.run(f"cat {file}")
            if not by_command:
                assert "sh (process " in mount.log_tail()
            mount.start()
            assert file.read_bytes() == b"saved"
    finally:
        mount.clean_up()
        if container is not None:
            container.end()


def _doctor(mount: Mount) -> list[str]:
    return mount.cli("doctor", str(mount.path), check=False).stdout.splitlines()


def test_the_examples_are_what_they_claim(tmp_path: Path) -> None:
    """As far as this can be seen without a cluster: the shell reads one, and the other propagates."""
    subprocess.run(["sh", "-n", str(EXAMPLES / "slurm" / "prolog.sh")], check=True, timeout=30)
    assert os.access(EXAMPLES / "slurm" / "prolog.sh", os.X_OK)
    text = (EXAMPLES / "kubernetes" / "daemonset.yaml").read_text()
    assert (
        text.count("mountPropagation: Bidirectional") == text.count("mountPropagation: HostToContainer") == 1
    )
