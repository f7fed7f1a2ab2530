"""The control socket: what is answered, and that nothing hostile or unlucky stops the server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from ckptfs.daemon import control, messages
from ckptfs.daemon.control import ControlServer, Report
from ckptfs.daemon.control_client import ControlClient
from ckptfs.daemon.messages import AnyRequest, Json, Progress
from ckptfs.daemon.peer import Peer, peer_of
from ckptfs.daemon.rights import Caller
from ckptfs.store.errors import Conflict, InvalidRequest, NotFound, NotPermitted, Unavailable


async def answer(request: AnyRequest, peer: Peer, report: Report) -> Json:
    """A service that shows what reached it, and fails in every way that one can."""
    match request:
        case messages.Verify():
            for done in range(4):
                report(Progress(done=done, total=4))
                await trio.sleep(0.02)
        case messages.Tag():
            raise Conflict("taken \udcff")
        case messages.Du():
            raise ZeroDivisionError
        case messages.Pin():
            raise OSError(5, "Input/output error")
    return {"path": request.path, "uid": peer.caller.uid}


def served(tmp_path: Path, client: Callable[[str], None]) -> None:
    """Run `client` in a thread against a server."""
    path = str(tmp_path / "s.sock")

    async def main() -> None:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                await nursery.start(ControlServer(path, answer, everybody=False).serve)
                await trio.to_thread.run_sync(client, path)
                nursery.cancel_scope.cancel()

    trio.run(main)
    assert not os.path.exists(path)


def raw(path: str, sent: bytes) -> list[dict[str, object]]:
    """What a client gets that sends these bytes and then no more."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(path)
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # refused before all was sent
        return [json.loads(line) for line in connection.makefile("rb")]


def test_results_errors_and_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    def client(path: str) -> None:
        with ControlClient(path, os.geteuid()) as connection:
            assert connection.ask(messages.Log(path="/a\udcff/é")) == {
                "path": "/a\udcff/é",
                "uid": os.geteuid(),
            }
            with pytest.raises(Conflict, match="taken \udcff"):
                connection.ask(messages.Tag(path="/x", name="y"))
            with pytest.raises(Unavailable, match="Input/output error"):
                connection.ask(messages.Pin(path="/x"))
            assert connection.ask(messages.Status()) is not None

    served(tmp_path, client)


def test_a_bug_is_logged_and_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def client(path: str) -> None:
        with ControlClient(path, os.geteuid()) as connection, pytest.raises(Unavailable, match="log says"):
            connection.ask(messages.Du())

    served(tmp_path, client)
    assert "ZeroDivisionError" in caplog.text


def test_progress_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PROGRESS_EVERY_S", 0.01)
    seen: list[Progress] = []

    def client(path: str) -> None:
        with ControlClient(path, os.geteuid()) as connection:
            connection.ask(messages.Verify(), seen.append)

    served(tmp_path, client)
    assert seen and seen == sorted(seen, key=lambda p: p.done)


HOSTILE = [
    (b"\n", "not a line of JSON"),
    (b"{}\n", "missing required field `do`"),
    (b"[1]\n", "Expected `object`"),
    (b"nonsense\n", "not a line of JSON"),
    (b"\xff\xfe\n", "not a line of JSON"),
    (b'{"do":"log","path":NaN}\n', "not a line of JSON"),
    (b'{"do":"format"}\n', "Invalid value 'format'"),
    (b'{"do":"log","path":1}\n', "Expected `str`"),
    (b'{"do":"log","path":"/","force":true}\n', "unknown field `force`"),
    (b'{"do":"publish","path":"/x","step":"1"}\n', "Expected `int | null`"),
    (b'{"do":"log","path":"run"}\n', "does not start at the root"),
    (b'{"do":"log","path":"/a/../b"}\n', "goes up"),
    (b'{"do":"log","path":"/a\\u0000"}\n', "does not start at the root"),
    (b'{"do":"log","path":"/a\\ud800"}\n', "no file name"),
    (b'{"do":"log","path":"/' + b"a" * 20_000 + b'"}\n', "longer than"),
    (b"[" * 60_000 + b"\n", "not a line of JSON"),
    (b"1" * 60_000 + b"\n", "not a line of JSON"),
    (b"x" * 70_000, "more than 65536 bytes"),
    (b"x" * 70_000 + b"\n", "more than 65536 bytes"),
    (b'{"do":"log"', "without a line end"),
]


@pytest.mark.parametrize(("sent", "said"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_lines_get_one_clear_refusal(tmp_path: Path, sent: bytes, said: str) -> None:
    def client(path: str) -> None:
        (reply,) = raw(path, sent)
        assert reply["ok"] is False
        error = reply["error"]
        assert isinstance(error, dict) and error["kind"] == "InvalidRequest"
        assert said in error["message"] and "\n" not in error["message"]
        assert raw(path, b'{"do":"status"}\n')[0]["ok"] is True

    served(tmp_path, client)


def test_a_refused_line_does_not_end_the_conversation(tmp_path: Path) -> None:
    def client(path: str) -> None:
        replies = raw(path, b'{"do":"x"}\n{"do":"log","path":"/a"}\n{"do":"log","path":"/b"}\n')
        assert [reply["ok"] for reply in replies] == [False, True, True]

    served(tmp_path, client)


def test_too_many_clients_are_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_CLIENTS_PER_USER", 2)

    def client(path: str) -> None:
        with ControlClient(path, os.geteuid()) as one, ControlClient(path, os.geteuid()) as two:
            assert one.ask(messages.Status()) and two.ask(messages.Status())
            with ControlClient(path, os.geteuid()) as three, pytest.raises(Unavailable):
                three.ask(messages.Status())

    served(tmp_path, client)


def test_silent_and_vanishing_clients_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "IDLE_S", 0.05)

    def client(path: str) -> None:
        assert raw(path, b"") == []
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(path)
            assert silent.recv(1) == b""
        with socket.socket(socket.AF_UNIX) as vanishing:
            vanishing.connect(path)
            vanishing.sendall(b'{"do":"verify"}\n')
        assert raw(path, b'{"do":"status"}\n')[0]["ok"] is True

    served(tmp_path, client)


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))

    def client(where: str) -> None:
        with pytest.raises(Conflict, match="another ckptfs daemon"):
            control._listen(where, 0o600)
        assert raw(where, b'{"do":"status"}\n')[0]["ok"] is True

    served(tmp_path, client)


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no ckptfs daemon answers"):
        ControlClient(str(tmp_path / "none.sock"), 0)


def test_a_daemon_that_dies_before_it_answers(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with ControlClient(path, os.geteuid()) as client:
            connection, _ = listener.accept()
            connection.close()
            with pytest.raises(Unavailable):
                client.ask(messages.Status())


def test_errors_keep_their_type() -> None:
    for kind in (NotFound, InvalidRequest, NotPermitted):
        error = messages.error_of(messages.Failure(kind=kind.__name__, message="why"))
        assert type(error) is kind and str(error) == "why"
    assert type(messages.error_of(messages.Failure(kind="SystemExit", message="why"))) is Unavailable


AS_ANOTHER = """
import os, socket, sys
os.setgroups([40101, 40102]); os.setgid(40103); os.setuid(40001)
connection = socket.socket(socket.AF_UNIX); connection.connect(sys.argv[1]); connection.recv(1)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: connects as another user")
def test_the_peer_is_known_with_all_its_groups(tmp_path: Path) -> None:
    name = f"\0ckptfs-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        script = AS_ANOTHER.replace("sys.argv[1]", repr(name))
        with subprocess.Popen([sys.executable, "-I", "-c", script]) as child:
            connection, _ = listener.accept()
            with connection:
                assert peer_of(connection) == Peer(child.pid, Caller(40001, frozenset({40101, 40102, 40103})))
