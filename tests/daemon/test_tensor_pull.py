"""`pull --tensor` of a real mount, as the safetensors library reads what came."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from mounting import Mount

Factory = Callable[..., Mount]


def test_a_tensor_comes_alone(mount_factory: Factory, tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    (tmp_path / "there").mkdir()
    remote = {"name": "there", "url": f"file://{tmp_path / 'there'}", "push": False}
    config = {"settle_s": 0.3, "remote": [remote]}
    first = mount_factory(config=config)
    folder = first.path / "run" / "step_7"
    folder.mkdir(parents=True)
    whole = torch.randn(700, 300)
    bias = torch.arange(10, dtype=torch.int64)
    save_file(
        {"layer/weight": whole, "layer/bias": bias, "big": torch.randn(3_000_000)}, folder / "m.safetensors"
    )
    first.publish("run", step=7, tag="good")
    first.ask("push", str(first.path))
    public = tmp_path / "node.pub"
    public.write_text(first.cli("keys", "show", str(first.path)).stdout)
    first.stop()
    shutil.rmtree(first.store)

    second = mount_factory(config=config)
    run = f"{second.path}/run"
    given = ["--key", str(public)]
    answer = second.facts("pull", f"{run}@good", "--tensor", "layer/weight", *given)
    assert (answer["live"], answer["file"]) == (True, "run.layer_weight/layer_weight.safetensors")
    assert whole.nbytes <= answer["fetched_bytes"] < whole.nbytes + 20_000
    (row,) = answer["tensors"]
    assert (row["name"], row["dtype"], row["shape"], row["path"]) == (
        "layer/weight", "F32", [700, 300], "step_7/m.safetensors",
    )  # fmt: skip
    with safe_open(second.path / str(answer["file"]), "pt") as file:
        assert [*file.keys()] == ["layer/weight"] and torch.equal(file.get_tensor("layer/weight"), whole)
        told = file.metadata()
    assert told["ckptfs.files"] == "step_7/m.safetensors" and told["ckptfs.version"].startswith("run@v0")
    assert second.verified("run.layer_weight")

    both = ["--tensor", "layer/bias", "--tensor", "layer/weight", "--as", "some/where/both.safetensors"]
    made = second.facts("pull", f"{run}/step_7/m.safetensors@step:7", *both, *given, "--no-live")
    assert made["fetched_bytes"] < 20_000, "the weight is here already"
    shown = second.history("some%2Fwhere") / str(made["name"]) / "both.safetensors"
    with safe_open(shown, "pt") as file:
        assert torch.equal(file.get_tensor("layer/bias"), bias)
    done = second.cli("pull", f"{run}@latest", "--tensor", "layer/bias", "--as", "b/b.st", *given)
    assert "layer/bias: I64 [10] of step_7/m.safetensors" in done.stdout and "fetched" in done.stdout

    def said(*arguments: str) -> str:
        failed = second.cli("pull", *arguments, check=False)
        assert failed.returncode == 1 and failed.stderr.count("\n") == 1, failed
        return failed.stderr

    assert "nearest: layer/bias" in said(run, "--tensor", "layer/bios", "--as", "x/y")
    assert "--as DIR/y" in said(run, "--tensor", "layer/bias", "--as", "y")
    assert "b is live here" in said(run, "--tensor", "layer/bias", "--as", "b/c")
    assert second.cli("pull", run, "--merge", "--tensor", "x", check=False).returncode == 2
    (version,) = cast("list[dict[str, Any]]", second.ask("log", f"{second.path}/b"))
    assert version["state"] == "partial" and "only layer/bias was pulled of version" in version["missing"][0]
