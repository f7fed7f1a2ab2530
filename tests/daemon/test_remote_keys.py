"""What `[[remote]]` opens: the key from a file or the service manager, the place from its URL."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from ckptfs.daemon.config import RemoteConfig, parse_config
from ckptfs.daemon.remotes import load_remote_key, open_remote
from ckptfs.store.errors import InvalidRequest, NotFound, NotPermitted
from ckptfs.store.remote.box import RemoteKey

DIGITS = "5e" * 32


def test_the_configuration_of_a_remote() -> None:
    one = "[[remote]]\nname = 'a'\nurl = 's3://b/c'\nendpoint = 'http://x'\n"
    first, second = parse_config(one + "[[remote]]\nname = 'b'\nurl = 'file:///d'\n").remote
    assert first == RemoteConfig(name="a", url="s3://b/c", endpoint="http://x")
    assert (second.name, second.key, second.push) == ("b", "", True)


def test_keys_come_from_files_and_from_the_service_manager(tmp_path: Path) -> None:
    (tmp_path / "backup").write_text(DIGITS + "\n")
    right = RemoteKey(bytes.fromhex(DIGITS)).check
    assert load_remote_key(str(tmp_path / "backup"), {}).check == right
    handed = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert load_remote_key("credential:backup", handed).check == right
    with pytest.raises(InvalidRequest, match="no service manager"):
        load_remote_key("credential:backup", {})
    for setting in ("credential:other", str(tmp_path / "other")):
        with pytest.raises(NotPermitted, match="cannot read the key"):
            load_remote_key(setting, handed)
    (tmp_path / "bad").write_text("secret")
    with pytest.raises(InvalidRequest, match="bad: not the key of a remote") as raised:
        load_remote_key(str(tmp_path / "bad"), {})
    assert "secret" not in str(raised.value)


def test_a_directory_by_its_url(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    remote = open_remote(RemoteConfig(name="x", url=f"file://{tmp_path}/a%20b"), {})
    trio.run(lambda: remote.open(create=True))
    assert (tmp_path / "a b/ckptfs-remote").exists()
    gone = open_remote(RemoteConfig(name="x", url=f"file://{tmp_path}/gone"), {})
    with pytest.raises(NotFound):
        trio.run(gone.open)


def test_a_remote_without_its_key_is_not_opened(tmp_path: Path) -> None:
    config = RemoteConfig(name="x", url=f"file://{tmp_path}", key=str(tmp_path / "nothing"))
    with pytest.raises(NotPermitted):
        open_remote(config, {})
    assert list(tmp_path.iterdir()) == []
