"""The command line against a daemon that is only a control socket: arguments, output, exit codes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import cast

import pytest
import sample_proofs
import trio
import typer

from ckptfs.daemon import cli, messages, mounts, places
from ckptfs.daemon.control import ControlServer, Report
from ckptfs.daemon.messages import AnyRequest, Json
from ckptfs.daemon.peer import Peer
from ckptfs.store.errors import Conflict, NotFound, NotPermitted
from ckptfs.store.signing import SigningKey

VERSION: Json = {
    "number": 3,
    "name": "v000003_20261129T160211Z",
    "time": "2026-11-29T16:02:11.000000Z",
    "time_ns": 1_796_000_000_000_000_000,
    "step": 100,
    "steps": [100],
    "tags": ["good"],
    "pinned": True,
    "state": "partial",
    "missing": ["shard 2 of 2 is absent"],
    "origin": "settled",
    "files": 2,
    "logical_bytes": 10,
    "root": "00" * 32,
    "cid": "bafyr4i",
}
STATUS: Json = {
    "version": "0.1.0",
    "mountpoint": "/mnt/x",
    "store": "/store",
    "write_path": "plain",
    "why": "because",
    "units": [
        {
            "name": "run\x1b[31m",
            "live": True,
            "versions": 3,
            "newest_complete": None,
            "newest_complete_age_s": None,
        }
    ],
    "stored_bytes": 1536,
    "stored": {"raw_bytes": 1024, "encoded_bytes": 512, "plain_bytes": 3072},
    "free_bytes": 5 << 30,
    "ingest_pending_bytes": 0,
    "scrub": {"age_s": None, "checked_bytes": None, "corrupt": None, "healed": None, "under_way_bytes": 5},
    "encoding": {"plain_bytes": 4096, "encoded_bytes": 2048, "pending_bytes": 1024, "left_raw_chunks": 1},
}
KEY = SigningKey(bytes(32)).public
PROOF: dict[str, Json] = {
    "unit": "run\x1b[31m",
    "head": "3:" + "00" * 32,
    "keys": [KEY.fingerprint],
    "trusted": [],
    "versions": [
        {"number": 1, "name": "v1", "signed": False, "key": None},
        {"number": 3, "name": "v3", "signed": True, "key": KEY.fingerprint},
    ],
}
FINDING: Json = {"fault": "removed", "number": 2, "message": "version 2 is missing in front of version 3"}
VERDICT: dict[str, Json] = {"number": 3, "name": "v3", "checked_bytes": 2048, "chunks": 2}
ANSWERS: dict[type, Json] = {
    messages.Log: [VERSION],
    messages.Status: STATUS,
    messages.Du: {
        "logical_bytes": 4096,
        "unique_bytes": 2048,
        "stored_bytes": 1024,
        "by_codec": {
            "delta": {"unique_bytes": 1536, "stored_bytes": 512},
            "raw": {"unique_bytes": 512, "stored_bytes": 512},
        },
        "versions": 1,
    },
    messages.Encode: {
        "dry_run": False,
        "chunks": 3,
        "looked_at_bytes": 4096,
        "encoded_chunks": 2,
        "plain_bytes": 2048,
        "encoded_bytes": 1024,
    },
    messages.Diff: {"before": "v1", "after": "v2", "files": []},
    messages.Unit: {"name": "a/b"},
    messages.Head: [{"unit": "run", "number": 3, "head": "3:00", "link": "00", "key": None}],
    messages.Keys: {"fingerprint": "sha256:00", "public": "-----BEGIN PUBLIC KEY-----\n", "retired": []},
    messages.RotateKey: {"fingerprint": "sha256:01", "public": "-----BEGIN PUBLIC KEY-----\n", "retired": []},
    messages.Digest: {"number": 1, "name": "v000001", "files": [{"path": "x", "sha256": "00" * 32}]},
    messages.Expect: {"name": "v000001", "files": [{"path": "x", "tensors": [{"name": "w"}]}]},
    messages.Seal: {"path": "x", "seal": "00" * 80},
    messages.Gc: {
        "dry_run": True,
        "freed_bytes": 1024,
        "forgotten": [{"unit": "run", "number": 1}],
        "kept": {
            "live tree": {"versions": 0, "stored_bytes": 2048},
            "open": {"versions": 0, "stored_bytes": 0},
            "policy": {"versions": 2, "stored_bytes": 512},
        },
    },
    messages.Prove: sample_proofs.answer(),
    messages.Rollback: [{"unit": "run", "to": "v2", "before": "v3", **VERSION}],
    **dict.fromkeys(
        (messages.Publish, messages.Tag, messages.Untag, messages.Pin, messages.Unpin, messages.Forget),
        VERSION,
    ),
}
CORRUPT: Json = {"path": "a/b", "tensor": "w", "chunk": "bafkr4i", "place": "segments/00/x.seg at byte 4096"}


class Daemon:
    """What the requests of one test met."""

    def __init__(self, mountpoint: Path) -> None:
        self.mountpoint = mountpoint
        self.seen: list[AnyRequest] = []
        self.corrupt: list[Json] = []
        self.findings: list[Json] = []
        self.error: Exception | None = None

    async def answer(self, request: AnyRequest, peer: Peer, report: Report) -> Json:
        """An answer of the right form for every request."""
        self.seen.append(request)
        if self.error is not None:
            raise self.error
        if isinstance(request, messages.Log) and request.verify:
            return {**PROOF, "findings": self.findings}
        return ANSWERS.get(type(request)) or {**VERDICT, "corrupt": self.corrupt, "elapsed_s": 2.0, "more": 0}


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A control socket that answers for a mount point of which only the mount table knows."""
    point = tmp_path / "mnt"
    table = tmp_path / "mountinfo"
    uid = os.geteuid()
    table.write_text(
        "26 1 254:0 / / rw - ext4 /dev/vda rw\n"
        f"40 26 0:43 / {point} rw - fuse.ckptfs /store rw,user_id={uid},group_id=0,allow_other\n"
    )
    monkeypatch.setattr(mounts, "_MOUNTINFO", str(table))
    monkeypatch.setattr(places, "ROOT_FOLDER", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    places.make_socket_folder(uid)
    found = Daemon(point)
    server = ControlServer(places.socket_path(str(point), uid), found.answer, everybody=False)
    ready = threading.Event()
    scope = trio.CancelScope()

    async def serve() -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve)
                token.append(trio.lowlevel.current_trio_token())
                ready.set()

    token: list[trio.lowlevel.TrioToken] = []
    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert ready.wait(10)
    yield found
    token[0].run_sync_soon(scope.cancel)
    thread.join(10)


def said(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    """What a command printed on stdout (or, if it failed, its one line on stderr)."""
    assert cli.run(arguments) == code, capsys.readouterr().err
    out, err = capsys.readouterr()
    if code == 0:
        assert err == ""
        return out
    assert err.count("\n") <= 1
    return err or out


def test_the_request_of_every_command(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = str(daemon.mountpoint / "run")
    public = tmp_path / "key.pub"
    public.write_text(KEY.pem())
    expected: list[tuple[tuple[str, ...], AnyRequest]] = [
        (("log", run), messages.Log(path="/run")),
        (("publish", run, "--tag", "t", "--step", "7"), messages.Publish(path="/run", tag="t", step=7)),
        (("publish", run), messages.Publish(path="/run")),
        (("tag", f"{run}@3", "good"), messages.Tag(path="/run@3", name="good")),
        (("untag", run, "good"), messages.Untag(path="/run", name="good")),
        (("pin", f"{run}@latest"), messages.Pin(path="/run@latest")),
        (("unpin", f"{run}@latest"), messages.Unpin(path="/run@latest")),
        (("forget", f"{run}@step:5~2"), messages.Forget(path="/run@step:5~2")),
        (("rollback", run, "--to", "good"), messages.Rollback(path="/run", to="good")),
        (
            ("rollback", run, str(daemon.mountpoint / "b"), "--to", "step:5"),
            messages.Rollback(path="/run", more=("/b",), to="step:5"),
        ),
        (("unit", f"{run}/sub/"), messages.Unit(path="/run/sub")),
        (("status", run), messages.Status(path="/run")),
        (("verify", f"{run}/sub/../x@3"), messages.Verify(path="/run/x@3")),
        (("diff", f"{run}@1", f"{run}@2"), messages.Diff(path="/run@1", other="/run@2")),
        (("prove", f"{run}/x@3"), messages.Prove(path="/run/x@3")),
        (("prove", f"{run}/x@3", "--tensor", "a b"), messages.Prove(path="/run/x@3", tensor="a b")),
        (("digest", f"{run}@1"), messages.Digest(path="/run@1")),
        (("expect", f"{run}@1"), messages.Expect(path="/run@1")),
        (
            ("expect", f"{run}/x@1", "--ways", "8", "--out", str(tmp_path / "expect")),
            messages.Expect(path="/run/x@1", ways=8),
        ),
        (("seal", f"{run}/x@1"), messages.Seal(path="/run/x@1")),
        (("keys", "list"), messages.Keys(path="/")),
        (("keys", "rotate"), messages.RotateKey(path="/")),
        (("keys", "rotate", run), messages.RotateKey(path="/run")),
        (("du", str(daemon.mountpoint)), messages.Du(path="/")),
        (("du", f"{daemon.mountpoint}@latest"), messages.Du(path="/@latest")),
        (("du", str(daemon.mountpoint), "--by-dtype"), messages.Du(path="/", by_dtype=True)),
        (("encode", run), messages.Encode(path="/run")),
        (("encode", f"{run}@1", "--dry-run"), messages.Encode(path="/run@1", dry_run=True)),
        (("encode", run, "--level", "small"), messages.Encode(path="/run", level="small")),
        (("gc",), messages.Gc(path="/")),
        (("gc", "--dry-run"), messages.Gc(path="/", dry_run=True)),
        (("status",), messages.Status(path="/")),
        (("head",), messages.Head(path="/")),
        (("head", run), messages.Head(path="/run")),
        (("keys", "show"), messages.Keys(path="/")),
        (("keys", "fingerprint", run), messages.Keys(path="/run")),
        (("log", run, "--verify"), messages.Log(path="/run", verify=True)),
        (("log", run, "--expect", "1:x"), messages.Log(path="/run", verify=True, expect="1:x")),
        (("log", run, "--key", str(public)), messages.Log(path="/run", verify=True, keys=(KEY.raw.hex(),))),
    ]
    for arguments, request in expected:
        for extra in ((), ("--json",)):
            said(capsys, 0, *arguments, *extra)
            assert daemon.seen[-1] == request, arguments


def test_json_is_what_the_daemon_answered(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(daemon.mountpoint / "run")
    assert json.loads(said(capsys, 0, "log", run, "--json")) == [VERSION]
    assert json.loads(said(capsys, 0, "status", "--json")) == STATUS
    assert json.loads(said(capsys, 0, "du", run, "--json"))["stored_bytes"] == 1024


def test_text_for_people(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(daemon.mountpoint / "run")
    log = said(capsys, 0, "log", run)
    for word in ("v000003_20261129T160211Z", "partial", "100", "good", "(pinned)", "shard 2 of 2 is absent"):
        assert word in log
    status = said(capsys, 0, "status")
    for word in ("plain (because)", "1.5 KiB", "5.0 GiB", "run\\x1b[31m"):
        assert word in status
    assert "\x1b" not in status
    usage = said(capsys, 0, "du", run)
    assert "4.0 KiB" in usage and "delta: 1.5 KiB in 512 B" in usage
    assert "4.0 KiB in 3 chunks looked at, 2.0 KiB of it in 1.0 KiB now" in said(capsys, 0, "encode", run)
    collected = said(capsys, 0, "gc", "--dry-run")
    for word in (
        "1.0 KiB would be given back, 1 versions would be forgotten",
        "live tree",
        "2.0 KiB",
        "512 B",
    ):
        assert word in collected
    assert "open" not in collected
    rolled = said(capsys, 0, "rollback", run, "--to", "2")
    assert "run is what it was in v2 (v000003_20261129T160211Z); before, it was v3" in rolled
    assert "2 chunks checked at 1.0 KiB/s, 0 corrupt" in said(capsys, 0, "verify", run)


def test_a_proof_is_written_and_checked(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    what, proof, file = f"{daemon.mountpoint}/run/x@1", str(tmp_path / "proof"), str(tmp_path / "\x1b[31m")
    answer = ANSWERS[messages.Prove]
    assert json.loads(said(capsys, 0, "prove", what)) == answer
    (tmp_path / "proof").write_text("an older one")
    assert "6 pieces" in said(capsys, 0, "prove", what, "--out", proof)
    assert json.loads((tmp_path / "proof").read_text()) == answer
    facts = json.loads(said(capsys, 0, "prove", what, "--out", proof, "--json"))
    assert facts["out"] == proof and facts["bytes"] == os.stat(proof).st_size
    Path(file).write_bytes(sample_proofs.CONTENT)
    assert {one for one in os.listdir(tmp_path) if one.startswith("proof")} == {"proof"}

    out = said(capsys, 0, "check", proof, file)
    signer = sample_proofs.KEY.public.fingerprint
    assert f"signed with {signer}, which the proof itself names" in out and "\x1b" not in out
    assert "step-7/model.safetensors of run, version 1" in out and "head 1:" in out
    key = tmp_path / "key.pub"
    key.write_text(sample_proofs.KEY.public.pem())
    out = said(capsys, 0, "check", proof, file, "--key", str(key))
    assert f"signed with {signer}\n" in out and "compare" not in out
    key.write_text(KEY.pem())
    assert "another key" in said(capsys, 1, "check", proof, file, "--key", str(key))
    assert "not a head" in said(capsys, 1, "check", proof, file, "--expect", "x")
    Path(file).write_bytes(sample_proofs.CONTENT[:-1] + b"x")
    assert "(tensor c)" in said(capsys, 1, "check", proof, file)
    for wrong in ("{}", json.dumps(answer).replace('"size":', '"size":1'), "x" * 100):
        (tmp_path / "proof").write_text(wrong)
        line = said(capsys, 1, "check", proof, file)
        assert line.startswith(f"ckptfs: {proof}: ") and line.count("\n") == 1


def test_scrub_says_what_it_found(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(daemon.mountpoint)
    assert "2 chunks checked at 1.0 KiB/s, 0 corrupt, 0 healed" in said(capsys, 0, "scrub", run)
    assert daemon.seen == [messages.Scrub(path="/")]
    found: dict[str, Json] = {
        "path": None, "tensor": None, "chunk": None, "place": "format", "what": "a bit", "healed": True,
    }  # fmt: skip
    daemon.corrupt = [found, {**found, "path": "/run/x@1", "tensor": "w", "healed": False}]
    out = said(capsys, 1, "scrub", run)
    assert "healed: a bit at format" in out and "corrupt: /run/x@1, tensor w: a bit at format" in out
    assert "1 corrupt, 1 healed" in out
    assert json.loads(said(capsys, 1, "scrub", run, "--json"))["corrupt"] == daemon.corrupt


def test_status_tells_of_the_last_scrub(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert "never" in said(capsys, 0, "status", str(daemon.mountpoint))


def test_status_tells_what_is_encoded_and_what_the_encoder_failed_of(
    daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    said_of_it = said(capsys, 0, "status", str(daemon.mountpoint))
    assert "1.5 KiB (1.0 KiB raw; 3.0 KiB in 512 B encoded)" in said_of_it
    assert "4.0 KiB in 2.0 KiB" in said_of_it and "1.0 KiB" in said_of_it and "left raw" in said_of_it


def test_log_verify_names_what_it_finds(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(daemon.mountpoint / "run")
    out = said(capsys, 0, "log", run, "--verify")
    assert "2 versions, 1 signed" in out and KEY.fingerprint in out and "head 3:" in out
    assert "no public key is known here" in out and "not signed" in out and "\x1b" not in out
    daemon.findings = [FINDING]
    out = said(capsys, 1, "log", run, "--verify")
    assert out.startswith("removed: version 2 is missing in front of version 3\n")
    assert json.loads(said(capsys, 1, "log", run, "--verify", "--json"))["findings"] == [FINDING]


def test_heads_and_keys(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    head = said(capsys, 0, "head")
    assert "run" in head and "3:00" in head and "not signed" in head
    assert said(capsys, 0, "keys", "show") == "-----BEGIN PUBLIC KEY-----\n"
    assert said(capsys, 0, "keys", "fingerprint") == "sha256:00\n"


def test_verify_fails_when_something_is_corrupt(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.corrupt = [CORRUPT]
    out = said(capsys, 1, "verify", str(daemon.mountpoint / "run"))
    assert "a/b, tensor w: chunk bafkr4i at segments/00/x.seg at byte 4096" in out
    answer = json.loads(said(capsys, 1, "verify", str(daemon.mountpoint / "run"), "--json"))
    assert answer["corrupt"] == [CORRUPT]


@pytest.mark.parametrize("error", [NotFound("no such\nthing"), Conflict("taken"), NotPermitted("not you")])
def test_an_error_is_one_line_and_exit_1(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    daemon.error = error
    line = said(capsys, 1, "log", str(daemon.mountpoint / "run"))
    assert line == f"ckptfs: {str(error).replace(chr(10), chr(92) + 'n')}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("frobnicate",),
        ("log",),
        ("log", "/a", "/b"),
        ("log", "/a", "--jsonn"),
        ("publish", "/a", "--step", "many"),
        ("tag", "/a@3"),
        ("mount", "/mnt"),
        ("mount", "/mnt", "--store", "/s", "--config", "/does/not/exist"),
        ("rebuild",),
    ],
)
def test_bad_usage_is_exit_2(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    assert said(capsys, 2, *arguments).startswith("ckptfs: ")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--help",)):
        out = said(capsys, 0, *arguments)
        for command in ("mount", "umount", "status", "log", "publish", "verify", "prove", "check", "rebuild"):
            assert command in out


def test_no_daemon(daemon: Daemon, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "not on a ckptfs mount" in said(capsys, 1, "log", str(tmp_path))
    os.unlink(places.socket_path(str(daemon.mountpoint), os.geteuid()))
    line = said(capsys, 1, "log", str(daemon.mountpoint / "run"))
    assert "no ckptfs daemon answers" in line and "--store" in line
    assert "no store at" in said(capsys, 1, "log", "/run", "--store", str(tmp_path / "absent"))


def test_a_mount_point_within_its_store_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    point = tmp_path / "store" / "mnt"
    point.mkdir(parents=True)
    assert "must not lie in each other" in said(
        capsys, 1, "mount", str(point), "--store", str(tmp_path / "store")
    )
    assert "must not lie in each other" in said(
        capsys, 1, "mount", str(tmp_path), "--store", str(tmp_path / "store")
    )


def test_a_mount_point_that_is_not_an_empty_directory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store, point = str(tmp_path / "store"), tmp_path / "mnt"
    assert "no directory" in said(capsys, 1, "mount", str(point), "--store", store)
    point.touch()
    assert "not a directory" in said(capsys, 1, "mount", str(point), "--store", store)
    point.unlink()
    (point / "full").mkdir(parents=True)
    assert "not empty" in said(capsys, 1, "mount", str(point), "--store", store)
    assert not (tmp_path / "store").exists()


def test_umount_of_what_is_no_mount(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "no ckptfs is mounted" in said(capsys, 1, "umount", str(tmp_path))


def test_each_command_is_found_where_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Only the group of the command that is asked for is imported: one in no group would be unknown."""
    for group, commands in cli.GROUPS.items():
        alone = typer.Typer()
        alone.callback()(lambda: None)
        import_module(f"ckptfs.daemon.{group}").register(alone)
        assert tuple(cast("typer.core.TyperGroup", typer.main.get_command(alone)).commands) == commands
        for command in commands:
            assert cli.run([command, "--help"]) == 0
            assert f"ckptfs {command}" in capsys.readouterr().out
