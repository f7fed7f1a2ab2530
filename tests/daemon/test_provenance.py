"""Who wrote a version, through a real mount: found, shown, turned off; no secret of theirs in the store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from mounting import Mount

SECRET = "correct-horse-battery"
SCRIPT = "import sys; open(sys.argv[1], 'wb').write(sys.argv[2].encode())\n"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(params=["plain", "auto"])
def mount(mount_factory: Callable[..., Mount], request: pytest.FixtureRequest) -> Mount:
    return mount_factory(config={"write_path": request.param})


def written(folder: Path, file: Path, *more: str, **environment: str) -> int:
    """A process that writes `file` from the working directory `folder`; its id."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    (folder / ".git").mkdir(exist_ok=True)
    (folder / ".git" / "HEAD").write_text(COMMIT)
    command = [sys.executable, "-u", str(script), str(file), f"content {len(more)}", *more]
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, **environment})
    assert process.wait(60) == 0
    return process.pid


def writers(mount: Mount, number: int) -> Sequence[Mapping[str, Any]]:
    rows = mount.ask("log", str(mount.path / "run"))
    assert isinstance(rows, list)
    (found,) = [row["writers"] for row in rows if row["number"] == number]
    assert isinstance(found, list)
    return found


def test_a_version_says_who_wrote_it(mount: Mount, tmp_path: Path) -> None:
    (mount.path / "run").mkdir()
    pid = written(
        tmp_path, mount.path / "run" / "a", "--config", "conf/a.yaml", "--seed=7", SLURM_JOB_ID="77", RANK="3"
    )
    record = mount.publish("run")
    (writer,) = writers(mount, int(str(record["number"])))
    assert writer["pid"] == pid and writer["uid"] == os.geteuid()
    assert writer["program"].startswith("python")
    assert writer["arguments"] == ["train.py", "--config=conf/a.yaml", "--seed=7"]
    assert (
        writer["commit"] == COMMIT and writer["ids"]["SLURM_JOB_ID"] == "77" and writer["ids"]["RANK"] == "3"
    )
    assert writer["cgroup"] == Path("/proc/self/cgroup").read_text().splitlines()[-1].split(":", 2)[2]
    text = mount.cli("log", str(mount.path / "run")).stdout
    assert "train.py" in text and "job 77" in text and COMMIT[:10] in text
    other = written(tmp_path, mount.path / "run" / "b")
    record = mount.publish("run")
    assert [one["pid"] for one in writers(mount, int(str(record["number"])))] == [other], (
        "who wrote since then"
    )


def test_no_secret_is_kept_anywhere(mount: Mount, tmp_path: Path) -> None:
    """Words and values outside the allowlist, in every place that a secret may be put in."""
    (mount.path / "run").mkdir()
    written(
        tmp_path, mount.path / "run" / "a", "--token", SECRET, f"--password={SECRET}", SECRET, f"-p{SECRET}",
        "--seed", SECRET, "--config", f"https://u:{SECRET}@host", f"--{SECRET}", f"--lr={SECRET}",
        HF_TOKEN=SECRET, AWS_SECRET_ACCESS_KEY=SECRET, SLURM_JOB_NAME=SECRET, RANK=f"0 {SECRET}",
        WANDB_API_KEY=SECRET,
    )  # fmt: skip
    command = f"exec 3>{mount.path}/run/b; echo {SECRET} >/dev/null; echo b >&3"
    subprocess.run(["bash", "-ec", command, SECRET], check=True, timeout=60, env={**os.environ, "X": SECRET})
    code = f"x = '{SECRET}'; open('{mount.path}/run/c', 'w').write('c')"
    subprocess.run([sys.executable, "-Ic", code], check=True, timeout=60)
    record = mount.publish("run")
    assert len(writers(mount, int(str(record["number"])))) == 3
    assert SECRET not in mount.cli("log", "--json", str(mount.path / "run")).stdout
    mount.stop()
    kept = [path for path in mount.store.rglob("*") if path.is_file()]
    assert any(b"train.py" in path.read_bytes() for path in kept), "a writer is somewhere in it"
    assert not [path for path in kept if SECRET.encode() in path.read_bytes()]
    assert SECRET not in mount.log_tail(lines=100_000)


def test_nothing_is_kept_where_it_is_off(mount_factory: Callable[..., Mount], tmp_path: Path) -> None:
    mount = mount_factory(config={"provenance": False})
    (mount.path / "run").mkdir()
    written(tmp_path, mount.path / "run" / "a")
    record = mount.publish("run")
    assert writers(mount, int(str(record["number"]))) == []
    mount.stop()
    kept = [path for path in mount.store.rglob("*") if path.is_file()]
    assert not [path for path in kept if b"train.py" in path.read_bytes()]


def test_a_bare_store_tells_it_too(mount: Mount, tmp_path: Path) -> None:
    (mount.path / "run").mkdir()
    pid = written(tmp_path, mount.path / "run" / "a")
    mount.publish("run")
    mount.stop()
    done = mount.cli("log", "--json", "--store", str(mount.store), "/run")
    assert f'"pid": {pid}' in done.stdout
