"""Every decoder for a moment: a value or the promised error, in bounded memory. For long: tests/fuzz.py."""

from __future__ import annotations

import pytest
from fuzzing import check, decoders, inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("name", sorted(decoders()))
def test_right_encodings_are_values(name: str) -> None:
    one = decoders()[name]
    assert any([check(one, encoded) for encoded in one.whole])


@pytest.mark.parametrize("name", sorted(decoders()))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_bytes(name: str, data: st.DataObject) -> None:
    one = decoders()[name]
    check(one, data.draw(inputs(one)))


def test_no_decoder_of_the_store_is_left_out() -> None:
    """Functions called decode_… or …_of that take bytes and may raise Corrupt have a line in the table."""
    import ast
    from pathlib import Path

    import ckptfs.store.ids

    folder = Path(ckptfs.store.ids.__file__).parent
    named = {function for function in _called_in_table()}
    for path in sorted([*folder.glob("*.py"), *folder.glob("codecs/*.py"), *folder.glob("remote/*.py")]):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("decode_"):
                assert node.name in named, f"{path.name}: {node.name}"


def _called_in_table() -> set[str]:
    import ast
    from pathlib import Path

    import fuzzing

    tree = ast.parse(Path(fuzzing.__file__).read_text())
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    return imported
