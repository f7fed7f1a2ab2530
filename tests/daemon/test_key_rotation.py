"""key_rotation: a crash at any step leaves a key that works; what it signs is proven with any of them."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from mounting import Mount

from ckptfs.daemon import key_rotation
from ckptfs.daemon.key_files import read_public_key
from ckptfs.daemon.key_rotation import read_rotations, rotate_key, rotations_path
from ckptfs.daemon.keys import known_keyring, load_keyring, public_path
from ckptfs.store.errors import Conflict, InvalidRequest, NotPermitted
from ckptfs.store.signing import SigningKey


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "keys" / "signing.pem"
    load_keyring(str(place))
    return place


def signing(path: Path) -> SigningKey:
    key = load_keyring(str(path)).signing
    assert key is not None
    return key


def test_a_new_key_in_the_place_of_the_old_one(path: Path) -> None:
    old = signing(path)
    new = rotate_key(str(path), 5)
    assert new.public != old.public
    ring = load_keyring(str(path))
    assert ring.signing is not None and ring.signing.public == new.public
    assert ring.retired == [old.public] and ring.trusted == [old.public, new.public]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_public_key(public_path(str(path))) == new.public
    kept = f"signing.{old.public.fingerprint.partition(':')[2][:8]}.pub"
    assert read_public_key(str(path.with_name(kept))) == old.public
    assert sorted(os.listdir(path.parent)) == sorted(
        ["signing.pem", "signing.pub", "signing.rotations", kept]
    )
    assert not any(old.pem() in file.read_text() for file in path.parent.iterdir()), (
        "the old one is destroyed"
    )
    third = rotate_key(str(path), 6)
    assert load_keyring(str(path)).trusted == [old.public, new.public, third.public]


class Died(BaseException):
    pass


def test_a_crash_at_any_step_leaves_a_key_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = set()
    for step in range(40):
        place = tmp_path / str(step) / "signing.pem"
        old = signing(place)
        calls = 0

        def counted(call: Callable[..., object], step: int = step) -> Callable[..., object]:
            def wrapper(*arguments: object, **options: object) -> object:
                nonlocal calls
                calls += 1
                if calls > step:
                    raise Died
                return call(*arguments, **options)

            return wrapper

        with monkeypatch.context() as patch:
            for name in ("open", "write", "fchmod", "fsync", "rename", "unlink", "chown"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                rotate_key(str(place), 5)
                finished = True
            except Died:
                finished = False
        for _ in range(2):
            ring = load_keyring(str(place))
            assert ring.signing is not None
            assert not place.with_name("signing.next.pem").exists()
            assert read_public_key(public_path(str(place))) == ring.signing.public
            if ring.signing.public == old.public:
                assert ring.rotations == () and not finished
            else:
                assert ring.trusted == [old.public, ring.signing.public]
        outcomes.add((ring.signing.public == old.public, finished))
        rotate_key(str(place), 6)
        if finished:
            break
    assert outcomes == {(True, False), (False, False), (False, True)}


def test_two_at_once(path: Path) -> None:
    with key_rotation._locked(str(path)), pytest.raises(Conflict, match="another process"):
        rotate_key(str(path), 5)
    assert load_keyring(str(path)).rotations == ()


def test_an_old_copy_that_is_put_back_is_refused(path: Path) -> None:
    before = path.read_text()
    rotate_key(str(path), 5)
    path.write_text(before)
    with pytest.raises(InvalidRequest, match="was retired"):
        load_keyring(str(path))
    with pytest.raises(InvalidRequest, match="was retired"):
        rotate_key(str(path), 6)


def test_what_cannot_be_used_is_not_rotated(path: Path) -> None:
    path.chmod(0o644)
    with pytest.raises(NotPermitted):
        rotate_key(str(path), 5)
    path.chmod(0o600)
    path.write_text("nothing")
    with pytest.raises(InvalidRequest):
        rotate_key(str(path), 5)
    assert sorted(os.listdir(path.parent)) == ["signing.pem", "signing.pub"]


def test_a_flipped_bit_is_put_right_and_more_damage_is_refused(path: Path, rng: random.Random) -> None:
    rotate_key(str(path), 5)
    rotate_key(str(path), 6)
    place = Path(rotations_path(str(path)))
    whole, right = place.read_bytes(), read_rotations(str(path))
    for bit in rng.sample(range(8 * len(whole)), 25):
        damaged = bytearray(whole)
        damaged[bit >> 3] ^= 1 << (bit & 7)
        place.write_bytes(damaged)
        assert read_rotations(str(path)) == right, bit
    lines = whole.splitlines()
    for broken in (b"nothing\n", b'{"record": 5}\n', b'{"record": "00"}\n', whole[:300], b"[" * 100_000):
        place.write_bytes(broken)
        with pytest.raises(InvalidRequest, match="damaged"):
            load_keyring(str(path))
    place.write_bytes(lines[0].replace(b'"record": "a', b'"record": "b') + b"\n")
    with pytest.raises(InvalidRequest):
        load_keyring(str(path))


def test_the_keys_of_a_store_without_a_daemon(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr("ckptfs.daemon.keys.default_key_path", lambda: str(path))
    old = signing(path)
    new = rotate_key(str(path), 5)
    ring = known_keyring()
    assert ring.signing is None and ring.trusted == [old.public, new.public]
    Path(rotations_path(str(path))).write_text("damaged")
    assert known_keyring().trusted == [new.public]


# ---- on a mount -----------------------------------------------------------------------------


def test_on_a_mount(mount_factory: Callable[..., Mount], tmp_path: Path) -> None:
    mount = mount_factory(config={"settle_s": 0.3})
    keys = mount.log.with_name("signing.pem")

    def save(text: str) -> None:
        (mount.path / "run").mkdir(exist_ok=True)
        (mount.path / "run/model").write_text(text)
        mount.publish("run")

    def verified(*arguments: str, code: int = 0) -> str:
        done = mount.cli("log", str(mount.path / "run"), "--verify", *arguments, check=False)
        assert done.returncode == code, done
        return done.stdout

    save("one")
    first = tmp_path / "first.pub"
    first.write_text(mount.cli("keys", "show", str(mount.path)).stdout)
    mount.cli("seal", f"{mount.path / 'run/model'}@1", "--out", str(tmp_path / "seal"))
    answer = mount.cli("keys", "rotate", str(mount.path), "--json")
    assert '"retired": [{' in answer.stdout
    second = tmp_path / "second.pub"
    second.write_text(mount.cli("keys", "show", str(mount.path)).stdout)
    assert first.read_text() != second.read_text()
    listed = mount.cli("keys", "list", str(mount.path)).stdout.splitlines()
    assert len(listed) == 3 and "retired" in listed[1] and "in use" in listed[2]
    save("two")
    for known in (
        (),
        ("--key", str(first)),
        ("--key", str(second)),
        ("--key", str(first), "--key", str(second)),
    ):
        assert "0 findings" in verified(*known)
    mount.kill9()
    # Without a daemon, and twice: the next start tells the histories.
    for _ in range(2):
        mount.cli("keys", "rotate", "--key", str(keys))
    mount.restart()
    assert "0 findings" in verified() and "0 findings" in verified("--key", str(first))
    save("three")
    for known in ((), ("--key", str(first)), ("--key", str(second))):
        assert "0 findings" in verified(*known)
    verified("--key", str(first), "--key", str(second), code=1)
    (tmp_path / "model").write_text("one")
    sealed = (str(tmp_path / "model"), str(tmp_path / "seal"))
    mount.cli("check-seal", *sealed, "--key", str(first))
    assert mount.cli("check-seal", *sealed, "--key", str(second), check=False).returncode == 1
    mount.cli("seal", f"{mount.path / 'run/model'}@1", "--out", str(tmp_path / "seal1"))
    mount.stop()
    mount.cli("rebuild", "--store", str(mount.store))
    mount.start()
    assert "0 findings" in verified() and "0 findings" in verified("--key", str(first))


def test_without_a_key_there_is_nothing_to_rotate(mount_factory: Callable[..., Mount]) -> None:
    mount = mount_factory(config={"key": "none"})
    done = mount.cli("keys", "rotate", str(mount.path), check=False)
    assert done.returncode == 1 and "not signed" in done.stderr and done.stderr.count("\n") == 1
