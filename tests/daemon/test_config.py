"""The configuration file: defaults, refusals that name the mistake, sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptfs.daemon.config import Config, load_config, parse_config, size_bytes
from ckptfs.store.errors import InvalidRequest
from ckptfs.store.retention import Policy


def test_every_key_has_a_default() -> None:
    assert parse_config("") == load_config(None) == Config()


def test_all_keys() -> None:
    text = """
    settle_s = 1
    settle_max_s = 5.5
    units = ["/*/*", "/a/b/*"]
    min_free = "10GiB"
    log_level = "debug"
    write_path = "plain"
    key = "/etc/other/key.pem"
    """
    config = parse_config(text)
    assert (config.settle_s, config.settle_max_s) == (1.0, 5.5)
    assert config.units == ("/*/*", "/a/b/*")
    assert config.min_free_bytes(1 << 50) == 10 << 30
    assert config.key == "/etc/other/key.pem" and parse_config("key = 'none'").key == "none"
    assert (config.log_level, config.write_path) == ("debug", "plain")


def test_policies() -> None:
    text = """
    [[policy]]
    path = "/*"
    keep_last = 3
    keep_days = 0.5
    [[policy]]
    path = "/"
    versions = false
    """
    runs, root = parse_config(text).policy
    assert runs.retention == Policy("/*", keep_last=3, keep_days=0.5) and runs.versions
    assert not root.retention.is_limit and not root.versions


def test_a_long_settle_time_takes_its_limit_along() -> None:
    assert parse_config("settle_s = 60").settle_max_s == 60


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("settle = 1", "did you mean `settle_s`"),
        ("min_fre = 1", "did you mean `min_free`"),
        ("zzz = 1", "known keys are"),
        ("[[policy]]\npath = 'x'", "not a glob"),
        ("[[policy]]\nkeep_last = 3", "`path`"),
        ("[[policy]]\npath = '/x'\nkeep_lats = 3", "`keep_lats`"),
        ("[[policy]]\npath = '/x'\nkeep_last = 0", "`policy[0].keep_last`: expected"),
        ("[[policy]]\npath = '/x'\nkeep_days = -1", "`policy[0].keep_days`: expected"),
        ("policy = 3", "`policy`: expected"),
        ("copies = 2", "`copies`: 2 of 0 remotes"),
        ("[[remote]]\nname = 'x'", "`url`"),
        ("[[remote]]\nname = 'a b'\nurl = 'file:///x'", "not a name"),
        ("[[remote]]\nname = 'x'\nurl = 'ftp://x'", "is not one of file:///"),
        ("[[remote]]\nname = 'x'\nurl = 'file:///x'\nkey = 'k'", "neither an absolute path"),
        ("[[remote]]\nname = 'x'\nurl = 'file:///x'\nregion = 'k'", "for s3:// only"),
        ("[[remote]]\nname = 'x'\nurl = 'file:///x'\n" * 2, "two are called 'x'"),
        ("[[remote]]\nname = 'x'\nurl = 'file:///x'\nsecret = 'k'", "`secret`"),
        ("key = 'signing.pem'", "not the absolute path"),
        ("settle_s = 'soon'", "`settle_s`: expected"),
        ("settle_s = true", "`settle_s`: expected"),
        ("settle_s = -1", "`settle_s`: expected"),
        ("settle_s = nan", "`settle_s`"),
        ("settle_s = 9\nsettle_max_s = 8", "shorter"),
        ("units = ['run']", "not a glob"),
        ("units = ['/']", "not a glob"),
        ("units = ['/a/../b']", "not a glob"),
        ("units = [1]", "`units[0]`: expected"),
        ("min_free = 'much'", "not a size"),
        ("min_free = '120%'", "no room"),
        ("min_free = -1", "negative"),
        ("log_level = 'loud'", "`log_level`"),
        ("write_path = 'fast'", "`write_path`"),
        ("settle_s = ", "not TOML"),
        ("a = " + "[" * 5000, "not TOML"),
        ('settle_s = "\udca2 5%"', "not UTF-8"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_config(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ckptfs.toml"
    with pytest.raises(InvalidRequest, match="cannot read the configuration"):
        load_config(str(path))
    path.write_text("nonsense = 1")
    with pytest.raises(InvalidRequest, match=r"ckptfs\.toml: unknown key"):
        load_config(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        load_config(str(path))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000", 1000),
        ("1k", 1000),
        ("1 KiB", 1024),
        ("1.5MiB", 3 << 19),
        ("2TB", 2 * 10**12),
        ("5gi", 5 << 30),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text) == size


def test_a_share_of_the_disk() -> None:
    assert Config(min_free="2.5%").min_free_bytes(1000) == 25
    assert Config(min_free=7).min_free_bytes(1000) == 7
    assert Config().min_free_bytes(1000) is None
