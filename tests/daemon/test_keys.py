"""keys: made once, at first use, for its owner alone; what cannot be used stops the start with one line."""

from __future__ import annotations

import os
import random
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptfs.daemon.keys import (
    ROOT_KEYS,
    default_key_path,
    known_public_key,
    load_or_make_key,
    public_path,
    read_public_key,
)
from ckptfs.store.errors import CkptfsError, InvalidRequest, NotPermitted, Unavailable
from ckptfs.store.signing import SigningKey


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "keys" / "signing.pem"


def test_a_key_is_made_once(path: Path) -> None:
    made = load_or_make_key(str(path))
    assert made is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    public = Path(public_path(str(path)))
    assert public == path.with_suffix(".pub") and stat.S_IMODE(public.stat().st_mode) == 0o644
    assert read_public_key(str(public)) == read_public_key(str(path)) == made.public
    again = load_or_make_key(str(path))
    assert again is not None and again.public == made.public
    assert sorted(os.listdir(path.parent)) == ["signing.pem", "signing.pub"]


def test_two_who_start_at_once_have_one_key(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(load_or_make_key, [str(path)] * 8))
    assert len({key.public for key in keys if key is not None}) == 1 and None not in keys
    assert sorted(os.listdir(path.parent)) == ["signing.pem", "signing.pub"]


def test_unsigned_only_where_the_configuration_says_so(path: Path) -> None:
    assert load_or_make_key("none") is None


def test_the_usual_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_key_path() == f"{ROOT_KEYS}/signing.pem"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert default_key_path() == str(tmp_path / "xdg" / "ckptfs" / "keys" / "signing.pem")
    assert known_public_key() is None
    made = load_or_make_key("")
    assert made is not None and known_public_key() == made.public
    os.unlink(public_path(default_key_path()))
    assert known_public_key() == made.public
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_key_path() == str(tmp_path / ".config" / "ckptfs" / "keys" / "signing.pem")


def refused(path: Path, kind: type[CkptfsError], text: str) -> None:
    """The start is refused with one line, and the file is left as it is."""
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(kind, match=text) as caught:
        load_or_make_key(str(path))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert before is None or path.read_bytes() == before


def test_a_key_that_cannot_be_used_stops_the_start(path: Path) -> None:
    load_or_make_key(str(path))
    path.chmod(0o640)
    refused(path, NotPermitted, "chmod 600")
    path.chmod(0o600)
    path.write_text("not a key")
    refused(path, InvalidRequest, "PEM")
    path.write_text(SigningKey(b"x" * 32).public.pem())
    refused(path, InvalidRequest, "public key")
    path.unlink()
    path.mkdir()
    refused(path, InvalidRequest, "not a file")
    path.rmdir()
    path.symlink_to("/does/not/exist")
    refused(path, Unavailable, "none")


def test_a_place_where_none_can_be_made_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file" / "signing.pem", Unavailable, "`key`")


def test_a_public_half_that_is_another_is_left_alone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_or_make_key(str(path))
    other = SigningKey(b"x" * 32).public.pem()
    Path(public_path(str(path))).write_text(other)
    load_or_make_key(str(path))
    assert Path(public_path(str(path))).read_text() == other
    assert "is not the public half" in caplog.text


def test_a_flipped_bit_of_either_half_is_put_right(path: Path, rng: random.Random) -> None:
    key = load_or_make_key(str(path))
    assert key is not None
    for half in (path, path.with_suffix(".pub")):
        whole = half.read_bytes()
        for bit in rng.sample(range(8 * len(whole)), 8):
            damaged = bytearray(whole)
            damaged[bit >> 3] ^= 1 << (bit & 7)
            half.write_bytes(damaged)
            again = load_or_make_key(str(path))
            assert again is not None and again.public == key.public, (half.name, bit)
            half.write_bytes(whole)
