"""Memory against a version on a real mount: what a job holds, and what the command line loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from asking import DAEMON
from mounting import Mount, memory_folder

from ckptfs import gpu
from ckptfs.gpu.report import Reason, Status
from ckptfs.store.errors import Unavailable

CHUNK = 256 << 10


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    """One mount for all tests that neither stop it nor damage its store."""
    folder = tmp_path_factory.mktemp("shared")
    with (
        memory_folder() as memory,
        # It lives as long as all of the tests, those with mounts of their own as well, on a busy machine.
        Mount(folder / "mnt", memory / "store", logs=folder / "logs", limit_s=1800) as mount,
    ):
        yield mount


@pytest.fixture
def run(shared: Mount, request: pytest.FixtureRequest) -> Path:
    """An empty run of the test's own on it."""
    path: Path = shared.path / request.node.name.partition("[")[0]
    path.mkdir()
    return path


@pytest.fixture
def mount(mount_factory: Callable[..., Mount]) -> Mount:
    """A mount of the test's own, with an empty `run`."""
    mount = mount_factory(on_tmpfs=True)
    (mount.path / "run").mkdir()
    return mount


def model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Embedding(700, 512), torch.nn.LayerNorm(512), torch.nn.Linear(512, 300).to(torch.bfloat16)
    )


def flip_stored(mount: Mount, content: bytes, at: int) -> None:
    """Flip a bit of byte `at` of `content`, wherever the store keeps it."""
    for path in mount.store.glob("segments/*/*.seg"):
        start = path.read_bytes().find(content)
        if start >= 0:
            with path.open("r+b") as file:
                file.seek(start + at)
                byte = file.read(1)[0]
                file.seek(start + at)
                file.write(bytes([byte ^ 4]))
            return
    raise AssertionError("the store does not hold these bytes in one place")


def test_a_module_and_a_state_dict_of_their_versions(shared: Mount, run: Path) -> None:
    module = model()
    torch.save({"model": module.state_dict(), "step": 3}, run / "model.pt")
    safetensors.torch.save_file(dict(module.state_dict()), run / "model.safetensors")
    (run / "notes").write_text("no tensors")
    shared.publish(run.name, tag="good", step=3)
    (run / "model.pt").unlink()
    (run / "model.safetensors").write_bytes(b"gone")

    for what, names in (("model.pt", "model."), ("model.safetensors", "")):
        report = gpu.verify(module, f"{run}/{what}@step:3")
        assert report.ok and (report.unit, report.number, report.device) == (run.name, 1, "cpu"), report
        assert {one.stored_as for one in report.tensors} == {names + name for name in module.state_dict()}
    loaded = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    loaded["0.weight"].view(torch.int16)[400, 77] ^= 1 << 14
    report = gpu.verify(loaded, f"{run}/model.safetensors@good")
    (bad,) = report.corrupt
    assert bad.name == "0.weight" and len(report.verified) == len(loaded) - 1
    assert [(one.offset, one.length, one.path) for one in bad.bad] == [
        (3 * CHUNK, CHUNK, "model.safetensors")
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_checkpoint(shared: Mount, run: Path) -> None:
    state = {"weight": torch.randn(600, 300), "bias": torch.randn(40), "step": torch.tensor(5)}
    dcp.save(state, checkpoint_id=run / "step-5", no_dist=True)
    shared.publish(run.name)
    report = gpu.verify(state, f"{run}/step-5@latest")
    assert report.ok and [one.name for one in report.tensors] == ["weight", "bias", "step"]
    state["bias"][39] = 0
    assert [one.name for one in gpu.verify(state, f"{run}@latest").corrupt] == ["bias"]


def test_a_file_with_holes(shared: Mount, run: Path) -> None:
    """Zeros that were never written are verified like all others."""
    tensors = {"a": torch.zeros(5 * CHUNK // 4 + 3), "b": torch.ones(70_000)}
    content = safetensors.torch.save(tensors)
    with (run / "m.safetensors").open("wb") as file:
        file.truncate(len(content))
        start = content.index(b"\0" * 100)
        file.write(content[:start])
        file.seek(len(content) - 280_000)
        file.write(content[-280_000:])
    shared.publish(run.name)
    version = f"{run}@latest"
    assert gpu.verify(tensors, version).ok
    tensors["a"][3 * CHUNK // 4 + 1] = -0.0
    (bad,) = gpu.verify(tensors, version).corrupt
    assert (bad.bad[0].offset, bad.bad[0].chunk_text) == (3 * CHUNK, "hole")


def test_an_expectation_goes_where_there_is_no_mount(mount: Mount, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(500, 500), "b": torch.randn(9)}
    safetensors.torch.save_file(tensors, mount.path / "run/m.safetensors")
    mount.publish("run")
    out = tmp_path / "expect.json"
    said = mount.cli("expect", f"{mount.path}/run@latest", "--out", str(out)).stdout
    assert "2 tensors in 1 files" in said
    printed = mount.cli("expect", f"{mount.path}/run@latest").stdout
    mount.stop()
    offline = mount.cli("expect", "run@1", "--store", str(mount.store), "--json").stdout
    for text in (out.read_text(), printed, offline):
        assert gpu.verify(tensors, gpu.parse_expectation(text)).ok
    with pytest.raises(Unavailable, match="not on a ckptfs mount"):
        gpu.verify(tensors, f"{mount.path}/run@latest")


def test_what_cannot_be_asked_is_one_line(shared: Mount, run: Path) -> None:
    (run / "x").write_text("x")
    shared.publish(run.name)
    for version, line in (
        (f"{run}@nope", "there is no version or tag 'nope'"),
        (f"{shared.path}/nothing@1", "there is nothing at"),
        ("/@1", "ckptfs"),
        ("--help", "ckptfs"),
    ):
        with pytest.raises(Unavailable) as caught:
            gpu.verify({}, version)
        assert line in str(caught.value) and "\n" not in str(caught.value)
    assert not gpu.verify({}, f"{run}@latest").ok


def test_a_damaged_chunk_of_the_store_hides_no_other_tensor(mount: Mount) -> None:
    """The digest of a small tensor comes from its bytes; those of large ones from the recipe alone."""
    tensors = {"a": torch.randn(500, 500), "z": torch.randn(9), "c": torch.randn(300, 300)}
    # The header is a chunk of its own: it is longer than a short run.
    padding = {f"p{n}": torch.zeros(1) for n in range(1500)}
    content = safetensors.torch.save(tensors | padding)
    (mount.path / "run/m.safetensors").write_bytes(content)
    mount.publish("run")
    mount.stop()
    z = tensors["z"].numpy().tobytes()
    flip_stored(mount, z, 5)
    mount.start()
    report = gpu.verify(tensors, f"{mount.path}/run@latest")
    assert [one.name for one in report.verified] == ["a", "c"]
    (one,) = report.unverifiable
    assert one.refusal is not None and one.refusal.reason is Reason.DAMAGED, one


def forget_pages(path: Path) -> None:
    """Have the kernel read a file anew."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def verified_on(mount: Mount, run: str, device: str, *more: str) -> tuple[int, Mapping[str, object], str]:
    """Exit code, JSON and text of `verify --device`."""
    done = mount.cli("verify", f"{mount.path}/{run}@latest", "--device", device, *more, check=False)
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 1, done.stderr
    return done.returncode, json.loads(done.stdout) if "--json" in more else {}, done.stdout + done.stderr


@pytest.fixture
def large(mount: Mount) -> Iterator[tuple[Mount, dict[str, torch.Tensor]]]:
    """A version with a file of several windows of a device's memory, and one without tensors."""
    tensors = {name: torch.randn(9 << 20) for name in ("a", "b")} | {"c": torch.randn(9)}
    safetensors.torch.save_file(tensors, mount.path / "run/m.safetensors")
    torch.save({"small": torch.randn(100, 100)}, mount.path / "run/small.pt")
    (mount.path / "run/notes").write_text("no tensors")
    mount.publish("run", timeout_s=120)
    yield mount, tensors


def test_the_command_loads_a_version_and_verifies_it(large: tuple[Mount, dict[str, torch.Tensor]]) -> None:
    mount, tensors = large
    code, answer, _ = verified_on(mount, "run", "cpu", "--json")
    assert code == 0 and answer["corrupt"] == [] and answer["device"] == "cpu"
    size = sum((mount.path / "run" / name).stat().st_size for name in ("m.safetensors", "small.pt"))
    assert (answer["checked_bytes"], answer["tensors"], answer["files"]) == (size, 4, 2)
    assert answer["others"] == ["notes"]
    assert "0 corrupt" in verified_on(mount, "run", "cpu")[2]

    # What was ingested since the mount counts as verified there: only the device sees it.
    flip_stored(mount, tensors["b"].numpy()[:1000].tobytes(), 999)
    forget_pages(mount.history("run") / "latest/m.safetensors")
    code, answer, _ = verified_on(mount, "run", "cpu", "--json")
    assert code == 1
    (row,) = cast("list[Mapping[str, object]]", answer["corrupt"])
    assert (row["path"], row["tensor"], row["offset"], row["length"]) == ("m.safetensors", "b", 0, CHUNK)

    # After another mount its bytes are refused, and that is told in the same way.
    mount.stop()
    mount.start()
    code, answer, _ = verified_on(mount, "run", "cpu", "--json")
    assert code == 1 and [row] == answer["corrupt"]
    code, _, text = verified_on(mount, "run", "cpu")
    assert code == 1 and f"tensor b: chunk {row['chunk']}, bytes 0 to {CHUNK}" in text and "1 corrupt" in text


def test_a_device_that_is_not_there_is_one_line(shared: Mount, run: Path) -> None:
    torch.save({"t": torch.randn(100, 100)}, run / "t.pt")
    shared.publish(run.name)
    code, _, text = verified_on(shared, run.name, "tpu:0")
    assert code == 1 and "tpu:0 is no device" in text
    done = shared.cli("verify", "run", "--device", "cpu", "--store", str(shared.store), check=False)
    assert done.returncode == 1 and "leave out --store" in done.stderr
    for ways in ("0", "65537"):
        done = shared.cli("expect", str(run), "--ways", ways, check=False)
        assert done.returncode == 1 and "among 1 to 65536 ranks" in done.stderr
    (shared.path / "plain").mkdir()
    (shared.path / "plain/x").write_text("x")
    shared.publish("plain")
    done = shared.cli("verify", f"{shared.path}/plain", "--device", "cpu", check=False)
    assert done.returncode == 1 and "no file with tensors" in done.stderr


def test_without_a_gpu_the_line_says_what_to_install(shared: Mount, run: Path, tmp_path: Path) -> None:
    """No PyCUDA, or no driver: whichever is missing, it is said in one line."""
    torch.save({"t": torch.randn(100, 100)}, run / "t.pt")
    shared.publish(run.name)
    # What the linker finds first, also on a machine that has a driver.
    (tmp_path / "libcuda.so.1").write_text("no driver")
    environment = {**shared.environment, "LD_LIBRARY_PATH": str(tmp_path)}
    command = [*DAEMON, "verify", str(run), "--device", "cuda:0"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "pip install 'ckptfs[gpu]'" in done.stderr or "install the driver" in done.stderr


def test_a_job_that_is_elsewhere_is_answered_from_any_directory(
    shared: Mount, run: Path, tmp_path: Path
) -> None:
    """The question is asked by another process: nothing in the job's directory may be imported there."""
    tensors = {"a": torch.randn(500, 500)}
    safetensors.torch.save_file(tensors, run / "m.safetensors")
    shared.publish(run.name)
    (tmp_path / "typer.py").write_text("raise SystemExit(7)")
    code = (
        "import sys, torch, safetensors.torch; from ckptfs import gpu;"
        "state = safetensors.torch.load_file(sys.argv[1] + '/m.safetensors');"
        "assert gpu.verify(state, sys.argv[1] + '@latest').ok"
    )
    subprocess.run([sys.executable, "-P", "-c", code, str(run)], check=True, timeout=120, cwd=tmp_path)


def test_statuses_are_words_that_scripts_compare() -> None:
    assert [str(one) for one in Status] == ["verified", "corrupt", "not verifiable"]
    assert str(Reason.NOT_IN_VERSION) == "not in the version"
