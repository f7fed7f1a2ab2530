"""How two tensors differ: against numpy on whole arrays, whatever the windows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.store.difference import ELEMENT_BYTES, Difference

FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def added(dtype: str, before: bytes, after: bytes, window: int) -> Difference:
    found = Difference(dtype)
    for at in range(0, len(after), window):
        found.add(before[at : at + window], after[at : at + window])
    return found


@settings(deadline=None)
@given(st.sampled_from(sorted(FLOATS)), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_floats(dtype: str, windows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kind: Any = FLOATS[dtype]
    before = rng.standard_normal(200).astype(kind)
    after = before.copy()
    after[rng.integers(0, 200, 20)] += kind(0.5)
    after[3], after[7], before[9] = np.nan, np.inf, -np.inf
    found = added(dtype, before.tobytes(), after.tobytes(), windows * ELEMENT_BYTES)
    gap = np.abs(after.astype(np.float64) - before.astype(np.float64))
    gap = gap[np.isfinite(gap)]
    old, new = (np.frombuffer(part.tobytes(), np.uint8) for part in (before, after))
    assert found.changed_bytes == np.count_nonzero(old != new)
    assert (found.nan, found.infinite) == (1, 1)
    assert found.largest == gap.max()
    assert math.isclose(found.l2, math.sqrt(float((gap * gap).sum())), rel_tol=1e-9)


def test_bfloat16() -> None:
    values = np.array([1.0, -2.0, np.inf, np.nan, 0.0, 3.0, 1.5, 8.0], np.float32)
    before = (values.view(np.uint32) >> 16).astype(np.uint16)
    after = before.copy()
    after[0] = 0x4000  # 2.0
    found = added("BF16", before.tobytes(), after.tobytes(), ELEMENT_BYTES)
    assert (found.largest, found.l2, found.nan, found.infinite) == (1.0, 1.0, 1, 1)
    assert found.changed_bytes == 2


def test_bits_decide() -> None:
    zeros = np.zeros(4, np.float32)
    found = added("F32", zeros.tobytes(), (-zeros).tobytes(), ELEMENT_BYTES)
    assert (found.changed_bytes, found.largest, found.l2) == (4, 0.0, 0.0)
    nothing = np.full(4, np.nan, np.float32).tobytes()
    same = added("F32", nothing, nothing, ELEMENT_BYTES)
    assert (same.changed_bytes, same.nan) == (0, 4)


@pytest.mark.parametrize("dtype", ["U8", "I64", "BOOL", "F8_E4M3"])
def test_what_is_no_number_here_is_compared_by_its_bytes(dtype: str) -> None:
    found = added(dtype, bytes(64), b"\xff" * 5 + bytes(59), ELEMENT_BYTES)
    assert (found.changed_bytes, found.largest, found.nan) == (5, 0.0, 0)
