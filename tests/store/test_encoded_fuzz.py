"""A few rounds of tests/encoded_fuzzing.py: whatever is wrong among encoded segments, readers get the right
bytes or an error, scrub and rebuild end, and the saves can be stored again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from encoded_fuzzing import run_round


@pytest.mark.parametrize("number", range(4))
def test_the_right_bytes_or_an_error(tmp_path: Path, rng: random.Random, number: int) -> None:
    done, found = run_round(tmp_path, rng.getrandbits(48) + number)
    assert done and found
