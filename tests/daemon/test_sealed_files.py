"""seal, check-seal: only what the signed history has is sealed; checking needs the file and a key only."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from filled_store import KEY, PIECE_BYTES, FilledStore, answered
from mounting import Mount

from ckptfs.daemon import cli
from ckptfs.daemon.messages import Progress
from ckptfs.store.digests import DigestsRecord, FileDigests, encode_digests
from ckptfs.store.errors import Conflict, InvalidRequest, NotFound, Unavailable
from ckptfs.store.frames import encode_frame
from ckptfs.store.history import RecordKind, VersionRecord
from ckptfs.store.history_log import history_path
from ckptfs.store.history_mirror import put_version, version_key
from ckptfs.store.ids import RecipeId
from ckptfs.store.index import Change, Table
from ckptfs.store.keyring import Keyring
from ckptfs.store.signing import SigningKey

A, B = (bytes([n]) * PIECE_BYTES for n in (1, 2))


@pytest.fixture
def history(filled_store: FilledStore) -> FilledStore:
    filled_store.make("/run", mode=0o755)
    filled_store.publish("run", {"x": A + B, "d/y": A})
    filled_store.publish("run", {"x": B, "d/y": A})
    return filled_store


def seal(store: FilledStore, text: str) -> dict[str, object]:
    told: list[Progress] = []
    answer = trio.run(store.files.seal, store.addresses.find(text), told.append)
    return dict(answered(answer))


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.run(["check-seal", *arguments])
    out, err = capsys.readouterr()
    assert (out + err).count("\n") == 1, "one line"
    return code, out + err


def test_a_file_is_checked_with_the_public_key_alone(
    history: FilledStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = seal(history, "/run/x@1")
    assert answer["sha256"] == hashlib.sha256(A + B).hexdigest() and answer["size"] == len(A + B)
    assert answer["key"] == KEY.public.fingerprint and answer["number"] == 1
    file, sealed, public, other = (tmp_path / name for name in ("x", "x.seal", "key.pub", "other.pub"))
    file.write_bytes(A + B)
    sealed.write_text(str(answer["seal"]))
    public.write_text(KEY.public.pem())
    other.write_text(SigningKey(b"o" * 32).public.pem())
    names = (str(file), str(sealed))
    assert checked(capsys, *names, "--key", str(public)) == (
        0,
        f"{file}: good, sealed by {KEY.public.fingerprint}\n",
    )
    assert checked(capsys, *names, "--key", str(other), "--key", str(public))[0] == 0
    code, said = checked(capsys, *names, "--key", str(other))
    assert code == 1 and "another key" in said
    sealed.write_bytes(bytes.fromhex(str(answer["seal"])))
    file.write_bytes(A + A)
    code, said = checked(capsys, *names, "--key", str(public), "--json")
    assert code == 1 and json.loads(said)["good"] is False and "not the file" in json.loads(said)["said"]
    sealed.write_bytes(b"short")
    code, said = checked(capsys, *names, "--key", str(public))
    assert code == 1 and "not the seal of a file" in said


def test_without_a_key_that_is_known_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ckptfs.daemon.sealed_files.known_keyring", Keyring)
    (tmp_path / "x").write_bytes(b"")
    code, said = checked(capsys, str(tmp_path / "x"), str(tmp_path / "x"))
    assert code == 1 and "--key" in said
    for arguments in ((str(tmp_path / "none"), str(tmp_path / "x")), (str(tmp_path), str(tmp_path / "none"))):
        assert checked(capsys, *arguments)[0] == 1


def test_what_is_no_file_or_not_there_is_refused(history: FilledStore) -> None:
    for text, kind in (("/run@1", InvalidRequest), ("/run/d@1", InvalidRequest), ("/run/z@1", NotFound)):
        with pytest.raises(kind):
            seal(history, text)
    history.files._keyring.signing = None
    with pytest.raises(Unavailable, match="key"):
        seal(history, "/run/x@1")


def record_of(history: FilledStore, number: int) -> VersionRecord:
    return history.addresses.record(history.addresses.find(f"/run@{number}"))


def recipe_of(history: FilledStore, number: int, name: bytes) -> RecipeId:
    tree = record_of(history, number).top.tree
    assert tree is not None
    (recipe,) = [entry.recipe for entry in history.segments.read_tree(tree) if entry.name == name]
    assert recipe is not None
    return recipe


def test_recorded_digests_are_taken_if_they_are_sealed(history: FilledStore) -> None:
    recorded, forged = FileDigests(2000, b"s" * 32, b"b" * 32, 1), FileDigests(1000, b"f" * 32, b"f" * 32, 2)
    history.digests.record(record_of(history, 1).unit, {recipe_of(history, 1, b"x"): recorded})
    assert seal(history, "/run/x@1")["sha256"] == recorded.sha256.hex()
    change = Change()
    change.put(Table.DIGEST, recipe_of(history, 2, b"x"), encode_digests(forged))
    history.index.apply(change)
    answer = seal(history, "/run/x@2")
    assert answer["sha256"] == hashlib.sha256(B).hexdigest(), "a row of the index alone counts for nothing"


def digested(store: FilledStore, text: str) -> dict[str, tuple[str, str]]:
    """`ckptfs digest`: for each path its SHA-256, and who says so."""
    answer = trio.run(store.files.digest, store.addresses.find(text), lambda _: None, lambda _: True)
    rows = answered(answer)["files"]
    assert isinstance(rows, list)
    return {str(one["path"]): (str(one["sha256"]), str(one["source"])) for one in map(answered, rows)}


def test_digests_are_those_of_the_sealed_record(history: FilledStore) -> None:
    """Somebody has rewritten the index: what it says is not shown, or shown as its own word."""
    x, y = (recipe_of(history, 1, b"x"), recipe_of(history, 2, b"x"))
    true = {text: hashlib.sha256(content).hexdigest() for text, content in (("x1", A + B), ("x2", B))}
    forged = FileDigests(2000, b"f" * 32, b"f" * 32, 2)
    sealed = FileDigests(2000, bytes.fromhex(true["x1"]), b"b" * 32, 1)
    assert digested(history, "/run/x@1") == {"x": (true["x1"], "chunks")}
    history.digests.record(record_of(history, 1).unit, {x: sealed})
    assert digested(history, "/run/x@1") == {"x": (true["x1"], "history")}
    change = Change()
    for recipe in (x, y):
        change.put(Table.DIGEST, recipe, encode_digests(forged))
    history.index.apply(change)
    assert digested(history, "/run/x@1") == {"x": (true["x1"], "history")}
    assert digested(history, "/run/x@2") == {"x": (forged.sha256.hex(), "index")}
    history.files._keyring.signing = SigningKey(b"another" + bytes(25))
    assert digested(history, "/run/x@1") == {"x": (forged.sha256.hex(), "index")}


def test_digests_that_another_unit_has_recorded(history: FilledStore) -> None:
    other = history.publish("other", {"same": A + B, "twin": A + B})
    said = FileDigests(2000, b"s" * 32, b"b" * 32, 1)
    history.digests.record(record_of(history, 1).unit, {recipe_of(history, 1, b"x"): said})
    assert other.unit != record_of(history, 1).unit
    expected = (said.sha256.hex(), "history")
    assert digested(history, "/other@1") == {"same": expected, "twin": expected}


def test_a_file_twice_is_hashed_once(history: FilledStore, monkeypatch: pytest.MonkeyPatch) -> None:
    history.publish("other", {"same": A + B, "twin": A + B})
    asked = []
    whole = history.files._files.digests

    async def noted(recipe: RecipeId, rest: Callable[[int], object]) -> FileDigests:
        asked.append(recipe)
        return await whole(recipe, rest)  # type: ignore[arg-type]

    monkeypatch.setattr(history.files._files, "digests", noted)
    expected = (hashlib.sha256(A + B).hexdigest(), "chunks")
    assert digested(history, "/other@1") == {"same": expected, "twin": expected} and len(asked) == 1


def test_a_record_that_is_not_sealed_counts_for_nothing(history: FilledStore) -> None:
    unit = history.histories.unit_named(b"run")
    assert unit is not None
    forged = DigestsRecord({recipe_of(history, 2, b"x"): FileDigests(1000, b"f" * 32, b"f" * 32, 2)})
    frame = encode_frame(RecordKind.DIGESTS, unit.frames + 1, forged.encode())
    with Path(history.disk.absolute(history_path(unit.unit))).open("ab") as file:
        file.write(frame)
    assert seal(history, "/run/x@2")["sha256"] == hashlib.sha256(B).hexdigest()


@pytest.mark.parametrize("row", [1, 2])
def test_nothing_is_sealed_that_the_history_does_not_say(history: FilledStore, row: int) -> None:
    """Somebody has put another tree into the row of version 2, or such a version 2 into another's row."""
    first, second = record_of(history, 1), record_of(history, 2)
    forged = Change()
    put_version(history.histories.units()[0], replace(second, top=first.top), forged)
    change = Change()
    change.put(Table.VERSION, version_key(first.unit, row), forged.operations[0][2] or b"")
    history.index.apply(change)
    with pytest.raises(Conflict, match="log --verify"):
        seal(history, "/run/x@2")


def test_what_another_key_signed_is_not_sealed(history: FilledStore) -> None:
    history.files._keyring.signing = SigningKey(b"another" + bytes(25))
    with pytest.raises(Conflict, match="key"):
        seal(history, "/run/x@2")


def test_what_nobody_sealed_is_said(mount_factory: Callable[..., Mount], rng: random.Random) -> None:
    from kernelmounts import poll

    mount = mount_factory(config={"settle_s": 0.3, "key": "none"})
    content = rng.randbytes(1 << 20)
    (mount.path / "run").mkdir()
    (mount.path / "run/model.bin").write_bytes(content)
    mount.publish("run")
    place = f"{mount.path / 'run'}@1"

    def source() -> object:
        (one,) = mount.facts("digest", place)["files"]  # type: ignore[misc]
        return one["source"]

    poll(lambda: source() == "index", 30)
    for command in ("digest", "export-oms"):
        done = mount.cli(command, place)
        assert hashlib.sha256(content).hexdigest() in done.stdout
        assert "model.bin" in done.stderr and "no sealed record" in done.stderr


def test_on_a_mount(mount_factory: Callable[..., Mount], tmp_path: Path, rng: random.Random) -> None:
    mount = mount_factory(config={"settle_s": 0.3})
    content = rng.randbytes(2 << 20)
    (mount.path / "run").mkdir()
    (mount.path / "run/model.bin").write_bytes(content)
    mount.publish("run")
    public, sealed, copy = tmp_path / "key.pub", tmp_path / "model.seal", tmp_path / "model.bin"
    public.write_text(mount.cli("keys", "show", str(mount.path)).stdout)
    mount.cli("seal", f"{mount.path / 'run/model.bin'}@1", "--out", str(sealed))
    assert len(sealed.read_bytes()) == 80
    assert (
        "exists"
        in mount.cli("seal", f"{mount.path / 'run/model.bin'}@1", "--out", str(sealed), check=False).stderr
    )
    copy.write_bytes(content)
    mount.stop()
    mount.cli("check-seal", str(copy), str(sealed), "--key", str(public))
    copy.write_bytes(content[:-1])
    assert mount.cli("check-seal", str(copy), str(sealed), "--key", str(public), check=False).returncode == 1
    refused = mount.cli("seal", "/run/model.bin@1", "--store", str(mount.store), check=False)
    assert refused.returncode == 1 and "needs a daemon" in refused.stderr
