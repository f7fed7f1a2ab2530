"""export-oms: the manifest says what a copy of the version holds, and openssl accepts who signed it."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mounting import Mount

from ckptfs.daemon.exporting import exported
from ckptfs.store.errors import InvalidRequest


def resources(statement: bytes) -> dict[str, str]:
    found = json.loads(statement)["predicate"]["resources"]
    return {one["name"]: one["digest"] for one in found}


def answer(**changed: Any) -> dict[str, Any]:
    files = [{"path": "a/b", "sha256": "ab" * 32}]
    return {"is_directory": True, "files": files, "others": [], **changed}


@pytest.mark.parametrize(
    ("inner", "name"),
    [("/run@1", "run"), ("/a/b/@latest", "b"), ("/run", "run"), ("/@3", "root"), ("/x@y/z@time:1", "z")],
)
def test_a_model_is_called_as_its_folder(inner: str, name: str) -> None:
    assert json.loads(exported(answer(), inner, None))["subject"][0]["name"] == name


def test_one_file_is_a_model_too() -> None:
    statement = exported(
        answer(is_directory=False, files=[{"path": "m", "sha256": "cd" * 32}]), "/run/m@1", None
    )
    assert resources(statement) == {".": "cd" * 32} and json.loads(statement)["subject"][0]["name"] == "m"


def test_what_a_manifest_cannot_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="'a/link' is no regular file"):
        exported(answer(others=["a/link"]), "/run@1", None)
    (tmp_path / "key.pem").write_text("nothing")
    with pytest.raises(InvalidRequest, match=r"key\.pem: "):
        exported(answer(), "/run@1", str(tmp_path / "key.pem"))


def test_on_a_mount(mount_factory: Callable[..., Mount], tmp_path: Path, rng: random.Random) -> None:
    mount = mount_factory(config={"settle_s": 0.3})
    save = mount.path / "run/checkpoint-5"
    (save / "weights").mkdir(parents=True)
    (save / "weights/model.bin").write_bytes(rng.randbytes(2 << 20))
    (save / "config.json").write_text("{}")
    (save / "ünïcode name").write_bytes(b"")
    mount.publish("run")
    shutil.copytree(mount.path / "run/.versions/latest/checkpoint-5", tmp_path / "checkpoint-5")
    key, public, sig = (str(tmp_path / name) for name in ("p256.pem", "p256.pub", "model.sig"))
    command = ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", key]
    subprocess.run(command, check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True)
    mount.cli("export-oms", f"{save}@1", "--key", key, "--out", sig)
    envelope = json.loads(Path(sig).read_bytes())["dsseEnvelope"]
    payload, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"]
    assert mount.cli("export-oms", f"{save}@1").stdout.strip().encode() == payload
    copied = {
        str(path.relative_to(tmp_path / "checkpoint-5")): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (tmp_path / "checkpoint-5").rglob("*")
        if path.is_file()
    }
    assert resources(payload) == copied and len(copied) == 3
    assert json.loads(payload)["subject"][0]["name"] == "checkpoint-5"
    (tmp_path / "signature").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    verify = ["openssl", "dgst", "-sha256", "-verify", public, "-signature", str(tmp_path / "signature")]
    signed = b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)
    assert subprocess.run(verify, input=signed, check=False).returncode == 0
    (save / "link").symlink_to("config.json")
    mount.publish("run")
    refused = mount.cli("export-oms", f"{save}@2", check=False)
    assert refused.returncode == 1 and "'link' is no regular file" in refused.stderr
    assert mount.facts("digest", f"{save}@2")["others"] == ["link"]
