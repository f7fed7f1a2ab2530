"""The health of tensors, against torch's own answers and against counting element by element."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from ckptfs import gpu
from ckptfs.gpu.report import Reason, Refusal
from ckptfs.store.health import Health

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SPECIAL = (
    0.0, -0.0, math.nan, math.inf, -math.inf, 65504.0, 65519.996, 65520.0, -65536.0, 3.3895313892515355e38,
    3.396e38, 3.3961775292304957e38, 3.4e38, -3.4e38, 1e39, 1e-39, 1e-46, 5e-324, 2.0**-14, 2.0**-15,
    2.0**-126, 2.0**-127, -(2.0**-133), 1.0,
)  # fmt: skip


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", TORCH)
def test_counts_are_torchs(dtype: str, rng: random.Random) -> None:
    torch.manual_seed(rng.randrange(1 << 30))
    chosen = torch.tensor([rng.choice(SPECIAL) for _ in range(5000)], dtype=torch.float64)
    bits = torch.randint(0, 256, (1000 * TORCH[dtype].itemsize,), dtype=torch.uint8)
    tensor = torch.cat([chosen.to(TORCH[dtype]), bits.view(TORCH[dtype])])
    health = Health(dtype)
    half = len(raw(tensor)) // 2 // 16 * 16
    health.add(raw(tensor)[:half])
    health.add(memoryview(raw(tensor))[half:])

    finite = tensor[torch.isfinite(tensor)]
    tiny = torch.finfo(TORCH[dtype]).tiny
    assert health.elements == tensor.numel()
    assert health.nan == int(torch.isnan(tensor).sum())
    assert health.infinite == int(torch.isinf(tensor).sum())
    assert health.subnormal == sum(0 < abs(one) < tiny for one in finite.tolist())
    # torch rounds to nearest, as a cast in a training loop does.
    assert health.over_f16 == int(torch.isinf(finite.to(torch.float16)).sum())
    if dtype != "F64":
        assert health.over_bf16 == int(torch.isinf(finite.to(torch.bfloat16)).sum())
    assert health.largest == float(finite.abs().max())


# Largest finite and smallest normal magnitude, as torch and the OCP specifications have them.
EIGHT_BITS = {
    "F8_E4M3": (torch.float8_e4m3fn, 448.0, 2.0**-6),
    "F8_E5M2": (torch.float8_e5m2, 57344.0, 2.0**-14),
    "F8_E4M3FNUZ": (torch.float8_e4m3fnuz, 240.0, 2.0**-7),
    "F8_E5M2FNUZ": (torch.float8_e5m2fnuz, 57344.0, 2.0**-15),
    "F8_E8M0": (torch.float8_e8m0fnu, 2.0**127, 2.0**-127),
}


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_every_number_of_eight_bits(dtype: str) -> None:
    kind, most, normal = EIGHT_BITS[dtype]
    bits = torch.arange(256, dtype=torch.uint8)
    numbers = bits.view(kind).to(torch.float64) if dtype != "F8_E8M0" else 2.0 ** (bits.double() - 127)
    if dtype == "F8_E8M0":
        numbers[255] = math.nan
    finite = numbers[torch.isfinite(numbers)].abs()
    assert finite.max() == most
    health = Health(dtype)
    health.add(raw(bits))
    assert (health.elements, health.nan) == (256, int(torch.isnan(numbers).sum()))
    assert health.infinite == int(torch.isinf(numbers).sum())
    assert health.zero == int((finite == 0).sum())
    assert health.subnormal == int(((finite > 0) & (finite < normal)).sum())
    assert health.saturated == int((finite == most).sum())
    assert (health.over_f16, health.over_bf16) == (int((finite >= 65520).sum()), 0)
    assert health.largest == most
    for one, number in zip(bits, numbers.tolist(), strict=True):
        if math.isfinite(number):
            alone = Health(dtype)
            alone.add(raw(one.reshape(1)))
            assert alone.largest == abs(number)


def test_a_double_overflows_bf16_where_a_float_does() -> None:
    health = Health("F64")
    limit = float(np.array([0x7F7F8000], np.uint32).view(np.float32)[0])
    health.add(np.array([limit, -limit, math.nextafter(limit, 0), 1e300]).tobytes())
    assert (health.over_bf16, health.over_f16) == (3, 4)


def test_both_parts_of_complex_numbers_count() -> None:
    health = Health("C64")
    health.add(np.array([complex(math.nan, 70_000), complex(1, math.inf)], np.complex64).tobytes())
    assert (health.elements, health.nan, health.infinite, health.over_f16) == (4, 1, 1, 1)


def test_nothing_has_a_health_of_nothing() -> None:
    health = Health("BF16")
    health.add(b"")
    assert not any(health.facts().values())


def test_a_module_in_memory() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(700, 500), torch.nn.BatchNorm1d(500)).to(torch.bfloat16)
    with torch.no_grad():
        module.get_parameter("0.weight")[499, 699] = math.nan
        module.get_parameter("0.weight")[0, 0] = 1e5
        module.get_parameter("1.bias")[3] = math.inf
    found = gpu.health_of(
        {"model": module.state_dict(), "odd": torch.zeros(3, 4).t(), "meta": torch.zeros(2).to("meta")}
    )
    weight, bias = found["model.0.weight"], found["model.1.bias"]
    assert isinstance(weight, Health) and isinstance(bias, Health)
    assert (weight.elements, weight.nan, weight.over_f16, bias.infinite) == (350_000, 1, 1, 1)
    refused = {name: one.reason for name, one in found.items() if isinstance(one, Refusal)}
    assert refused == {
        "model.1.num_batches_tracked": Reason.DTYPE,
        "odd": Reason.NOT_CONTIGUOUS,
        "meta": Reason.NO_MEMORY,
    }
