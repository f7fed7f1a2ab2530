"""Tensors in memory against a version: what is verified, found corrupt, or refused and why. No mount."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from expectations import expectation_of, torch_file

from ckptfs import gpu
from ckptfs.gpu.cpu_hasher import CpuHasher
from ckptfs.gpu.expected import Expectation, encode_expectation
from ckptfs.gpu.extents import Extent
from ckptfs.gpu.report import Reason, Report, Status, TensorReport
from ckptfs.gpu.verifying import verify_tensors
from ckptfs.store.errors import InvalidRequest

CHUNK = 256 << 10


class CountingHasher(CpuHasher):
    """Counts the bytes that it was asked to hash."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_bytes = 0
        self.calls = 0

    def mismatches(self, extents: Sequence[Extent]) -> list[int]:
        self.calls += 1
        self.asked_bytes += sum(extent.length for extent in extents)
        return super().mismatches(extents)


def saved(tensors: Mapping[str, torch.Tensor]) -> Expectation:
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return expectation_of({"model.safetensors": safetensors.torch.save(copies)})


def by_name(report: Report) -> dict[str, TensorReport]:
    assert len({one.name for one in report.tensors}) == len(report.tensors)
    return {one.name: one for one in report.tensors}


def refused(tensor: object, stored: torch.Tensor) -> Reason:
    """Why `tensor` cannot be verified against a version that holds `stored` under its name."""
    (one,) = gpu.verify({"t": tensor}, saved({"t": stored})).tensors
    assert one.status is Status.UNVERIFIABLE and one.refusal is not None
    assert one.refusal.sentence in str(one) and not one.bad
    return one.refusal.reason


def model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Embedding(500, 321),
        torch.nn.LayerNorm(321),
        torch.nn.Linear(321, 700).to(torch.bfloat16),
        torch.nn.BatchNorm1d(700),
    )


@pytest.mark.parametrize("form", ["safetensors", "torch", "nested"])
def test_a_module_is_verified(form: str) -> None:
    module = model()
    state = dict(module.state_dict())
    if form == "safetensors":
        expectation = saved(state)
    elif form == "torch":
        expectation = expectation_of({"model.pt": torch_file(state)})
    else:
        expectation = expectation_of({"model.pt": torch_file({"epoch": 3, "model": state})})
    report = gpu.verify(module, expectation)
    assert report.ok and report.device == "cpu" and not report.missing
    assert [one.name for one in report.tensors] == [*state]
    prefix = "model." if form == "nested" else ""
    assert [one.stored_as for one in report.tensors] == [prefix + name for name in state]
    assert report.hashed_bytes == sum(t.numel() * t.element_size() for t in state.values())


@pytest.mark.parametrize("bit", [0, 7, 30, 31])
def test_a_flipped_bit_is_found_in_its_tensor_and_chunk(bit: int) -> None:
    module = model()
    expectation = saved(module.state_dict())
    weight = module.get_parameter("0.weight")
    index = 300 * 321 + 20
    with torch.no_grad():
        weight.view(torch.int32).view(-1)[index] ^= 1 << bit if bit < 31 else -(1 << 31)
    report = gpu.verify(module, expectation)
    assert not report.ok and [one.name for one in report.corrupt] == ["0.weight"]
    (bad,) = report.corrupt[0].bad
    assert (bad.offset, bad.length) == (4 * index // CHUNK * CHUNK, min(CHUNK, 500 * 321 * 4 - bad.offset))
    file = expectation.files[0]
    tensor = next(one for one in file.tensors if one.name == "0.weight")
    assert bad.path == file.path and bad.file_offset == tensor.offset + bad.offset
    assert bad.chunk == next(p.chunk for p in file.parts() if p.offset == bad.file_offset)
    assert bad.chunk_text.startswith("bafkr4i") and bad.chunk_text in str(report)
    (row,) = [one for one in report.to_json()["tensors"] if one["name"] == "0.weight"]  # type: ignore[attr-defined]
    assert row["status"] == "corrupt" and row["corrupt"][0]["offset"] == bad.offset


def test_a_small_tensor_that_shares_its_chunk_is_found_alone() -> None:
    tensors = {f"t{n}": torch.randn(10 + n) for n in range(20)}
    expectation = saved(tensors)
    assert len(expectation.files[0].parts()) == 1
    tensors["t7"][3] += 1
    report = gpu.verify(tensors, expectation)
    assert [one.name for one in report.corrupt] == ["t7"] and len(report.verified) == 19
    assert (report.corrupt[0].bad[0].offset, report.corrupt[0].bad[0].length) == (0, 17 * 4)


def test_tied_tensors_are_hashed_once() -> None:
    weight = torch.nn.Parameter(torch.randn(300, 512))
    state = {"embed.weight": weight, "head.weight": weight, "alias": weight.view(300, 512)}
    for expectation in (
        expectation_of({"m.pt": torch_file(state)}),
        saved({"embed.weight": weight}),
        saved(dict.fromkeys(state, weight)),
    ):
        hasher = CountingHasher()
        report = verify_tensors(state, expectation, hashers=lambda _, one=hasher: nullcontext(one))  # type: ignore[misc]
        assert report.ok and hasher.calls == 1 and not report.missing
        assert hasher.asked_bytes == report.hashed_bytes == 300 * 512 * 4
        assert [one.tied_to for one in report.tensors] == [None, "embed.weight", "embed.weight"]
    with torch.no_grad():
        weight[0, 0] += 1
    assert len(gpu.verify(state, saved({"embed.weight": torch.zeros(300, 512)})).corrupt) == 3


def test_tied_memory_with_two_contents_is_hashed_for_each() -> None:
    weight = torch.randn(300, 512)
    state = {"a": weight, "b": weight}
    report = by_name(gpu.verify(state, saved({"a": weight, "b": weight + 1})))
    assert (report["a"].status, report["b"].status) == (Status.VERIFIED, Status.CORRUPT)


def test_refusals_of_what_lies_in_memory() -> None:
    stored = torch.randn(64, 128)
    assert refused(stored.t(), stored.t().contiguous()) is Reason.NOT_CONTIGUOUS
    assert refused(stored[:, ::2], stored[:, ::2].contiguous()) is Reason.NOT_CONTIGUOUS
    assert refused(stored.numpy().T, stored.T.contiguous()) is Reason.NOT_CONTIGUOUS
    assert refused(torch.zeros(64, dtype=torch.complex64).conj(), stored) is Reason.NOT_CONTIGUOUS
    assert refused(stored.to_sparse(), stored) is Reason.NOT_DENSE
    assert refused(stored.to("meta"), stored) is Reason.NO_MEMORY
    assert refused(torch.nn.LazyLinear(3).weight, stored) is Reason.NO_MEMORY
    assert refused(np.array(["a"], dtype=object), stored) is Reason.DTYPE
    assert refused(stored.numpy().astype(">f4"), stored) is Reason.DTYPE


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors() -> None:
    stored = torch.randn(64, 128)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([stored, stored[:3]], layout=layout)
        assert refused(nested, stored) is Reason.NOT_DENSE


def test_memory_that_was_given_back() -> None:
    """As FSDP does it with parameters between steps: reading there would end the process."""
    for left_bytes in (0, 4 * 1000):
        whole = torch.randn(2, 64, 128)
        stored, view, again = whole[1].clone(), whole[1], whole[0]
        whole.untyped_storage().resize_(left_bytes)
        for one in (view, again, whole):
            assert refused(one, stored) is Reason.NO_MEMORY


def test_a_tensor_without_memory_of_its_own() -> None:
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> torch.Tensor:  # type: ignore[misc]
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, *_: object, **__: object) -> object:
            return NotImplemented

    stored = torch.randn(64, 128)
    assert refused(Wrapper(stored), stored) is Reason.NO_MEMORY


def test_refusals_of_what_the_version_has() -> None:
    stored = torch.randn(64, 128)
    assert refused(stored.to(torch.bfloat16), stored) is Reason.DTYPE
    assert refused(stored.view(torch.int32), stored) is Reason.DTYPE
    assert refused(stored[:32], stored) is Reason.SHAPE
    assert refused(stored.reshape(128, 64), stored) is Reason.SHAPE
    report = by_name(
        gpu.verify({"t": stored, "layer.u": stored + 1}, saved({"t": stored, "layer.v": stored}))
    )
    assert report["t"].status is Status.VERIFIED
    refusal = report["layer.u"].refusal
    assert refusal is not None and refusal.reason is Reason.NOT_IN_VERSION
    assert "there is layer.v" in refusal.sentence


def test_a_name_in_several_files_is_ambiguous() -> None:
    file = safetensors.torch.save({"t": torch.ones(9)})
    expectation = expectation_of({"step-1/m.safetensors": file, "step-2/m.safetensors": file})
    (one,) = gpu.verify({"t": torch.ones(9)}, expectation).tensors
    assert one.refusal is not None and one.refusal.reason is Reason.AMBIGUOUS
    assert "step-1/m.safetensors" in one.refusal.sentence


def test_a_view_of_a_larger_storage_is_no_whole_tensor() -> None:
    """torch.save writes the whole storage; which part of it a tensor is, only its pickle says."""
    big = torch.randn(100, 300)
    (one,) = gpu.verify({"t": big[10:20]}, expectation_of({"m.pt": torch_file({"t": big[10:20]})})).tensors
    assert one.refusal is not None and one.refusal.reason is Reason.SHAPE


def test_names_with_a_prefix_and_wrappers() -> None:
    tensors = {"a.w": torch.randn(5), "b.w": torch.randn(6)}
    both = {f"{top}.{name}": tensor for top in ("ema", "model") for name, tensor in tensors.items()}
    expectation = saved(both)
    with pytest.raises(InvalidRequest, match="prefix="):
        gpu.verify(tensors, expectation)
    report = gpu.verify(tensors, expectation, prefix="ema.")
    assert report.ok and report.missing == ("model.a.w", "model.b.w")
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in tensors.items()}
    assert gpu.verify(wrapped, saved(tensors)).ok
    assert gpu.verify(wrapped, expectation, prefix="model.").ok


def test_what_is_only_in_the_version_is_listed() -> None:
    report = gpu.verify({"a": torch.ones(5)}, saved({"a": torch.ones(5), "b": torch.ones(6)}))
    assert report.ok and report.missing == ("b",) and "1 of the version not given" in str(report)


def test_nothing_given_is_not_verified() -> None:
    report = gpu.verify({}, saved({"a": torch.ones(5)}))
    assert not report.ok and report.missing == ("a",)
    for other in (5, None, torch.ones(3), "state"):
        with pytest.raises(InvalidRequest, match="neither a module nor a state dict"):
            gpu.verify(other, saved({}))


def test_empty_tensors_have_no_wrong_byte() -> None:
    report = gpu.verify({"e": torch.zeros(0, 7), "a": torch.ones(5)}, saved({"a": torch.ones(5)}))
    assert report.ok and by_name(report)["e"].size_bytes == 0


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
        torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
        torch.uint16, torch.uint32, torch.uint64,
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_every_dtype(dtype: torch.dtype, form: str) -> None:
    tensor = torch.arange(0, 90_000, dtype=torch.float64).to(dtype).reshape(300, 300)
    state = {"t": tensor, "scalar": tensor[0, 1].clone()}
    expectation = saved(state) if form == "safetensors" else expectation_of({"m": torch_file(state)})
    assert gpu.verify(state, expectation).ok
    tensor.view(torch.uint8).view(-1)[77] ^= 1
    assert [one.name for one in gpu.verify(state, expectation).corrupt] == ["t"]


def test_an_optimizer_is_verified() -> None:
    module = torch.nn.Linear(100, 200)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(3, 100)).sum().backward()
    optimizer.step()
    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    expectation = expectation_of({"checkpoint.pt": torch_file(state)})
    assert gpu.verify(state, expectation).ok
    assert gpu.verify(module, expectation).ok
    report = gpu.verify(optimizer, expectation)
    assert report.ok and "optimizer.state.0.exp_avg" in {one.stored_as for one in report.tensors}


def test_numpy_arrays_are_verified_without_torch(tmp_path: Path) -> None:
    code = """
import sys, numpy as np, safetensors.numpy
from ckptfs import gpu
text = open(sys.argv[1], "rb").read()
arrays = {"a": np.arange(100_000, dtype=np.float32), "b": np.ones(7, np.int64)}
assert gpu.verify(arrays, gpu.parse_expectation(text)).ok
arrays["a"][99_999] = 0
(bad,) = gpu.verify(arrays, gpu.parse_expectation(text)).corrupt
assert bad.name == "a" and bad.bad[0].offset == 262_144
assert "torch" not in sys.modules and "pycuda" not in sys.modules
"""
    arrays: dict[str, np.ndarray] = {"a": np.arange(100_000, dtype=np.float32), "b": np.ones(7, np.int64)}
    expectation = expectation_of({"m.safetensors": safetensors.numpy.save(arrays)})
    (tmp_path / "expect.json").write_text(json.dumps(encode_expectation(expectation)))
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "expect.json")], check=True, timeout=60)
