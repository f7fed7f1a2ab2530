"""`ckptfs prove` and `ckptfs check`: what is proven, to whom, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import torch
import torch.distributed.checkpoint as dcp
from asking import DAEMON
from filled_store import KEY, PIECE_BYTES, FilledStore
from mounting import Mount

from ckptfs.store.errors import Corrupt
from ckptfs.store.frames import decode_frames, encode_frame
from ckptfs.store.histories import Histories
from ckptfs.store.history import RecordKind
from ckptfs.store.history_log import history_path
from ckptfs.store.history_mirror import version_key
from ckptfs.store.index import Change, Table
from ckptfs.store.keyring import make_rotation
from ckptfs.store.proof import decode_proof, encode_proof
from ckptfs.store.proof_check import check_proof
from ckptfs.store.seal import decode_seal
from ckptfs.store.signing import SigningKey
from ckptfs.store.units import encode_unit

MIB = 1 << 20


@pytest.fixture
def run(mount: Mount) -> Path:
    path = mount.path / "run"
    path.mkdir()
    return path


@pytest.fixture
def away(tmp_path: Path) -> Path:
    """An empty folder, far from any store."""
    path = tmp_path / "away"
    path.mkdir()
    return path


def checked(away: Path, *arguments: str) -> tuple[int, Any, str]:
    """`ckptfs check … --json` where there is neither a store, nor a daemon, nor a home."""
    done = subprocess.run(
        [*DAEMON, "check", *arguments, "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=away,
        stdin=subprocess.DEVNULL,
        env={"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "HOME": str(away), "PATH": "/usr/bin:/bin"},
    )
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 1, done.stderr
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def proven(mount: Mount, away: Path, what: str, *options: str) -> str:
    """A proof in a file of `away`; its name."""
    name = f"proof{len(os.listdir(away))}.json"
    mount.cli("prove", f"{mount.path}/{what}", *options, "--out", str(away / name))
    return name


def arrays(count: int = 5, edge: int = 700) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {f"layer{n}.weight": rng.standard_normal((edge, 512)).astype(np.float32) for n in range(count)}


def test_a_file_is_proven_with_nothing_but_the_proof(mount: Mount, run: Path, away: Path) -> None:
    safetensors.numpy.save_file(arrays(), run / "model.safetensors")
    (run / "notes").write_bytes(b"beside")
    mount.publish("run", tag="good", step=7)
    key = mount.cli("keys", "show", str(mount.path)).stdout
    (away / "key.pub").write_text(key)
    name = proven(mount, away, "run/model.safetensors@good")
    saved = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(b"gone")
    mount.stop()
    (away / "downloaded").write_bytes(saved)

    code, answer, _ = checked(away, name, "downloaded", "--key", "key.pub")
    assert code == 0 and answer["ok"] and answer["trusted"] and answer["gaps"] == []
    assert (answer["unit_name"], answer["path"], answer["step"]) == ("run", "model.safetensors", 7)
    assert answer["checked_bytes"] == answer["size"] == len(saved) and answer["difference"] is None
    said = mount.cli("check", str(away / name), str(away / "downloaded")).stdout
    assert answer["sealed_by"] in said and "compare it" in said and "model.safetensors of run" in said
    assert checked(away, name, "downloaded", "--expect", answer["head"])[0] == 0
    code, _, error = checked(away, name, "downloaded", "--expect", f"9:{'00' * 32}")
    assert code == 1 and "not the one" in error

    place = 2 * MIB + 5
    (away / "downloaded").write_bytes(saved[:place] + bytes([saved[place] ^ 1]) + saved[place + 1 :])
    code, answer, _ = checked(away, name, "downloaded", "--key", "key.pub")
    found = answer["difference"]
    assert code == 1 and not answer["ok"] and place - 256 * 1024 < found["offset"] <= place
    assert found["tensor"] == "layer1.weight"
    for bytes_now in (saved[:place], saved + b"\0", b""):
        (away / "downloaded").write_bytes(bytes_now)
        code, answer, _ = checked(away, name, "downloaded")
        assert code == 1 and answer["difference"] is not None


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_one_tensor_is_proven_by_a_small_proof(mount: Mount, run: Path, away: Path, form: str) -> None:
    tensors = arrays(20)
    if form == "safetensors":
        safetensors.numpy.save_file(tensors, run / "model")
        name, dtype, shape = "layer13.weight", "F32", [700, 512]
    else:
        torch.save({name: torch.from_numpy(array) for name, array in tensors.items()}, run / "model")
        name, dtype, shape = "13", "F32", [700 * 512]
    mount.publish("run")
    wrong = mount.cli("prove", str(run / "model@1"), "--tensor", "layer13.wait", check=False)
    assert wrong.returncode == 1 and len(wrong.stderr.splitlines()) == 1 and "in all" in wrong.stderr
    if form == "torch":
        name = wrong.stderr.partition("it has '")[2].partition("'")[0]
    proof = proven(mount, away, "run/model@1", "--tensor", name)
    whole = proven(mount, away, "run/model@1")
    assert os.stat(away / proof).st_size * 3 < os.stat(away / whole).st_size
    saved = bytearray((run / "model").read_bytes())
    (away / "model").write_bytes(saved)
    code, answer, _ = checked(away, proof, "model")
    assert code == 0 and answer["gaps"] == [] and answer["stated_by"] == answer["sealed_by"]
    found = answer["tensor"]
    assert found["name"] == name and found["bytes"] == 700 * 512 * 4
    if form == "safetensors":
        assert (found["dtype"], found["shape"]) == (dtype, shape)
        array = np.frombuffer(saved[found["offset"] :][: found["bytes"]], np.float32).reshape(700, 512)
        assert np.array_equal(array, tensors[name])

    other = found["offset"] + found["bytes"] + 300_000
    saved[other] ^= 1  # what is not the tensor's is not read
    (away / "model").write_bytes(saved)
    assert checked(away, proof, "model")[0] == 0
    saved[found["offset"] + 99_999] ^= 1
    (away / "model").write_bytes(saved)
    code, answer, _ = checked(away, proof, "model")
    assert code == 1 and answer["difference"]["tensor"] == name


def test_a_file_that_names_the_bytes_otherwise_is_refused(mount: Mount, run: Path, away: Path) -> None:
    safetensors.numpy.save_file(arrays(3), run / "model")
    mount.publish("run")
    proof = proven(mount, away, "run/model@1", "--tensor", "layer1.weight")
    saved = (run / "model").read_bytes()
    turned = saved.replace(b"layer1.weight", b"layerX.weight").replace(b"layer2.weight", b"layer1.weight")
    (away / "model").write_bytes(turned)
    code, answer, _ = checked(away, proof, "model")
    assert code == 1 and "does not say" in answer["difference"]["message"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_tensor_in_a_shard_is_called_as_the_metadata_beside_it_says(
    mount: Mount, run: Path, away: Path
) -> None:
    state = {name: torch.from_numpy(array) for name, array in arrays(3).items()}
    dcp.save(state, checkpoint_id=run / "step", no_dist=True)
    mount.publish("run")
    (shard,) = [name for name in os.listdir(run / "step") if name.endswith(".distcp")]
    proof = proven(mount, away, f"run/step/{shard}@1", "--tensor", "layer1.weight")
    (away / "shard").write_bytes((run / "step" / shard).read_bytes())
    code, answer, _ = checked(away, proof, "shard")
    assert code == 0 and answer["tensor"]["name"] == "layer1.weight", answer
    assert answer["tensor"]["bytes"] == 700 * 512 * 4
    wrong = mount.cli("prove", str(run / "step/.metadata@1"), "--tensor", "layer1.weight", check=False)
    assert wrong.returncode == 1 and "no tensors" in wrong.stderr


def test_holes_and_empty_files(mount: Mount, run: Path, away: Path) -> None:
    with (run / "sparse").open("wb") as file:
        file.truncate(8 * MIB)
        file.seek(3 * MIB)
        file.write(os.urandom(MIB))
    (run / "empty").touch()
    mount.publish("run")
    for name in ("sparse", "empty"):
        proof = proven(mount, away, f"run/{name}@1")
        (away / name).write_bytes((run / name).read_bytes())
        code, answer, _ = checked(away, proof, name)
        assert code == 0 and answer["ok"], answer
    proof = proven(mount, away, "run/sparse@1")
    assert " -" in str(json.loads((away / proof).read_text())["pieces"]["rows"])
    content = bytearray((away / "sparse").read_bytes())
    content[7 * MIB] = 1
    (away / "sparse").write_bytes(content)
    code, answer, _ = checked(away, proof, "sparse")
    assert code == 1 and 4 * MIB <= answer["difference"]["offset"] <= 7 * MIB


def test_what_nobody_has_signed_is_accepted_only_if_asked(
    mount_factory: Any, away: Path, tmp_path: Path
) -> None:
    # Digests would be one more record, and the head another.
    mount = mount_factory(config={"key": "none", "digests": False})
    (mount.path / "run").mkdir()
    safetensors.numpy.save_file(arrays(2), mount.path / "run/model")
    mount.publish("run")
    proof = proven(mount, away, "run/model@1")
    (away / "model").write_bytes((mount.path / "run/model").read_bytes())
    head = mount.ask("head", str(mount.path / "run"))[0]["head"]
    code, answer, _ = checked(away, proof, "model")
    assert code == 1 and answer["difference"] is None and not answer["sealed_by"]
    assert "who wrote it" in answer["gaps"][0]
    assert checked(away, proof, "model", "--unsigned")[0] == 0
    assert checked(away, proof, "model", "--expect", head)[0] == 0
    (away / "key.pub").write_text(KEY.public.pem())
    code, answer, error = checked(away, proof, "model", "--unsigned", "--key", "key.pub")
    assert code == 1 and "nobody has signed" in error


def test_a_bare_store_is_proven_by_whoever_may_read_the_key(mount: Mount, run: Path, away: Path) -> None:
    safetensors.numpy.save_file(arrays(2), run / "model")
    mount.publish("run")
    (away / "model").write_bytes((run / "model").read_bytes())
    (away / "key.pub").write_text(mount.cli("keys", "show", str(mount.path)).stdout)
    mount.stop()
    private, config = mount.log.with_name("signing.pem"), mount.log.with_name("ckptfs.toml")
    store = ("--store", str(mount.store))

    def part(*options: str) -> tuple[int, Any, str]:
        what = ("/run/model@1", "--tensor", "layer1.weight")
        done = mount.cli("prove", *what, *store, *options)
        (away / "part").write_text(done.stdout)
        code, answer, _ = checked(away, "part", "model", "--key", "key.pub")
        assert answer["sealed_by"] and bool(answer["gaps"]) == bool(code) == bool(done.stderr)
        return code, answer, done.stderr

    code, answer, _ = part("--config", str(config))
    assert code == 0 and answer["stated_by"] == answer["sealed_by"]
    before = sorted(os.listdir(private.parent))
    private.chmod(0o644)  # Others can read it, so it is not used.
    for options in (("--config", str(config)), ()):
        code, _, said = part(*options)
        assert code == 1 and "nobody has signed" in said
    private.unlink()
    assert part("--config", str(config))[0] == 1
    assert sorted(os.listdir(private.parent)) == [name for name in before if name != private.name]
    done = mount.cli("prove", "/run/model@1", *store)
    (away / "whole").write_text(done.stdout)
    assert checked(away, "whole", "model")[0] == 0 and not done.stderr


def test_a_stranger_who_reads_a_bare_store_states_nothing(
    mount: Mount, run: Path, away: Path, tmp_path: Path
) -> None:
    from ckptfs.daemon.keys import load_or_make_key

    safetensors.numpy.save_file(arrays(2), run / "model")
    mount.publish("run")
    (away / "model").write_bytes((run / "model").read_bytes())
    mount.stop()
    key, config = tmp_path / "own.pem", tmp_path / "own.toml"
    load_or_make_key(str(key))
    config.write_text(f'key = "{key}"\n')
    place = ("/run/model@1", "--store", str(mount.store), "--config", str(config))
    (away / "part").write_text(mount.cli("prove", *place, "--tensor", "layer1.weight").stdout)
    code, answer, _ = checked(away, "part", "model", "--unsigned")
    assert code == 0 and len(answer["gaps"]) == 1 and answer["stated_by"] is None


def test_any_key_will_do_after_a_rotation(mount: Mount, run: Path, away: Path) -> None:
    safetensors.numpy.save_file(arrays(2), run / "model")
    mount.publish("run")
    for name in ("first.pub", "second.pub", "third.pub"):
        (away / name).write_text(mount.cli("keys", "show", str(mount.path)).stdout)
        if name != "third.pub":
            mount.cli("keys", "rotate", str(mount.path))
    (away / "model").write_bytes((run / "model").read_bytes())
    proof = proven(mount, away, "run/model@1", "--tensor", "layer1.weight")
    for keys in (("first.pub",), ("second.pub",), ("third.pub",), (), ("first.pub", "third.pub")):
        options = [option for name in keys for option in ("--key", name)]
        code, answer, error = checked(away, proof, "model", *options)
        assert code == 0 and answer["rotations"] == 2 and not answer["gaps"], (keys, error)
    (away / "other.pub").write_text(KEY.public.pem())
    assert checked(away, proof, "model", "--key", "other.pub")[0] == 1


def test_errors_are_one_line(mount: Mount, run: Path, away: Path) -> None:
    (run / "d").mkdir()
    (run / "d/plain").write_bytes(b"plain")
    (run / "link").symlink_to("d/plain")
    mount.publish("run")
    wrong = {
        ("run/d@1",): "directory",
        ("run@1",): "directory",
        ("run/link@1",): "regular file",
        ("run/absent@1",): "no absent",
        ("run/d/plain@9",): "no version 9",
        ("run/d/plain@1", "--tensor", "w"): "no format whose tensors are known",
        ("run/d/plain@1", "--out", str(away / "no/such")): "No such file",
        ("run/d/plain@1", "--out", str(away)): "not a file",
    }
    for (what, *options), expected in wrong.items():
        done = mount.cli("prove", f"{mount.path}/{what}", *options, check=False)
        assert (done.returncode, done.stdout) == (1, "") and expected in done.stderr, (what, done.stderr)
        assert len(done.stderr.splitlines()) == 1
    assert os.listdir(away) == []
    proof = proven(mount, away, "run/d/plain@1")
    os.mkfifo(away / "pipe")
    for arguments in ((proof, "absent"), ("absent", proof), (proof, "pipe"), (proof, "."), (proof, proof)):
        assert checked(away, *arguments)[0] == 1
    assert checked(away, proof)[0] == 2


# ---- over a store without a mount ----------------------------------------------------------------


@pytest.fixture
def store(filled_store: FilledStore) -> FilledStore:
    filled_store.make("/run", mode=0o755)
    return filled_store


def test_a_proof_holds_whatever_lies_around_the_file(store: FilledStore) -> None:
    files = {f"d{n % 7}/f{n}": os.urandom(PIECE_BYTES * (n % 4) + n) for n in range(40)}
    store.publish("run", {"x": b"before"})
    store.publish("run", files)
    for path, content in files.items():
        proof = decode_proof(encode_proof(store.proof(f"/run/{path}@2")))
        shown = check_proof(proof, [KEY.public])
        assert shown.record.number == 2 and shown.gaps == () and shown.name == b"run"
        assert proof.file.path == path.encode() and proof.file.size == len(content)


def test_a_name_that_was_recorded_with_the_version_is_in_its_proof(store: FilledStore) -> None:
    record = store.publish("run", {"x": b"1"})
    unit = store.histories.unit(record.unit)
    assert unit is not None
    change = Change()
    change.put(Table.UNIT, unit.unit, encode_unit(msgspec.structs.replace(unit, name=b"other")))
    store.histories.append_version(replace(record, number=2, before=unit.head), change)
    store.index.apply(change)
    proof = decode_proof(encode_proof(store.proof("/run/x@2")))
    assert [frame.kind for frame in proof.batch.records] == [RecordKind.RENAME, RecordKind.VERSION]
    assert check_proof(proof, [KEY.public]).name == b"other"


def test_a_version_that_the_history_does_not_hold_is_not_proven(store: FilledStore) -> None:
    record = store.publish("run", {"x": b"1"})
    change = Change()
    row = msgspec.msgpack.encode(replace(record, step=9))
    change.put(Table.VERSION, version_key(record.unit, 1), row)
    store.index.apply(change)
    with pytest.raises(Corrupt, match="history does not hold version 1"):
        store.proof("/run/x@1")


def test_a_seal_that_is_not_good_is_not_passed_on(store: FilledStore) -> None:
    record = store.publish("run", {"x": b"1"})
    path = Path(store.disk.absolute(history_path(record.unit)))
    frames = list(decode_frames(path.read_bytes()))
    seal = decode_seal(frames[-1].payload)
    forged = replace(seal, seal=seal.seal[:20] + bytes([seal.seal[20] ^ 1]) + seal.seal[21:])
    kept = [encode_frame(f.kind, f.sequence, f.payload) for f in frames[:-1]]
    last = encode_frame(frames[-1].kind, frames[-1].sequence, forged.encode())
    path.write_bytes(b"".join([*kept, last]))
    with pytest.raises(Corrupt, match="seal of version 1 is not good"):
        store.proof("/run/x@1")


def test_a_root_that_is_not_that_of_the_tree_is_not_proven(store: FilledStore) -> None:
    record = store.publish("run", {"x": b"1"})
    unit = store.histories.unit(record.unit)
    assert unit is not None
    change = Change()
    again = replace(record, number=2, root=bytes(32), before=unit.head)
    store.histories.append_version(again, change)
    store.index.apply(change)
    with pytest.raises(Corrupt, match="do not lead to the version's root"):
        store.proof("/run/x@2")


# ---- a key that was replaced -------------------------------------------------------------------------


NEW = SigningKey(b"new" + bytes(29))


def rotated(store: FilledStore) -> None:
    """KEY is replaced by NEW, and the history says so."""
    keyring = store.keyring
    keyring.rotations = (make_rotation(KEY, NEW.public, 1),)
    keyring.signing = NEW
    store.histories = Histories(store.disk, store.index, key=keyring)
    store.prover._histories = store.addresses._histories = store.histories
    for unit in store.histories.units():
        store.histories.record_rotation(unit.unit)


def test_what_the_old_key_has_sealed_is_vouched_for_by_the_new_one(store: FilledStore) -> None:
    store.publish("run", {"x": b"1"})
    assert store.proof("/run/x@1")["version"] == 1
    rotated(store)
    store.publish("run", {"x": b"2"})
    proofs = [decode_proof(encode_proof(store.proof(f"/run/x@{number}"))) for number in (1, 2)]
    assert [len(proof.rotations) for proof in proofs] == [1, 0]
    for proof in proofs:
        shown = check_proof(proof, [NEW.public])
        assert shown.stated_by == NEW.public and shown.gaps == ()
    assert check_proof(proofs[0], [KEY.public]).sealed_by == KEY.public


def test_what_a_stolen_old_key_seals_later_is_not_vouched_for(store: FilledStore) -> None:
    store.publish("run", {"x": b"1"})
    rotated(store)
    store.publish("run", {"x": b"2"})
    thief = Histories(store.disk, store.index, key=KEY)
    ours, store.histories = store.histories, thief
    store.publish("run", {"x": b"forged"})
    store.histories = Histories(store.disk, store.index, key=store.keyring)
    assert ours.unit_named(b"run") is not None
    store.prover._histories = store.addresses._histories = store.histories
    forged = decode_proof(encode_proof(store.proof("/run/x@3")))
    assert forged.batch.seal is not None and forged.batch.seal.key == KEY.public.raw
    assert forged.rotations == ()
    with pytest.raises(Corrupt):
        check_proof(forged, [NEW.public])
    true = decode_proof(encode_proof(store.proof("/run/x@1")))
    assert check_proof(true, [NEW.public]).record.number == 1
