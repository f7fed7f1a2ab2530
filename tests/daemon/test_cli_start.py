"""What a command imports before it asks the daemon, and that what it leaves out changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import pytest
import typer

from ckptfs.daemon.cli_values import check_late

# Each takes milliseconds, or asks for what does; a command that only asks the daemon needs none of them.
HEAVY = {
    "asyncio",
    "click",
    "cryptography",
    "Crypto",
    "email",
    "importlib.metadata",
    "importlib.resources",
    "logging",
    "lmdb",
    "multiformats",
    "multiprocessing",
    "numpy",
    "pydantic",
    "pydantic_core",
    "pyfuse3",
    "rich",
    "secrets",
    "tempfile",
    "trio",
    "zipfile",
}
RUN = """
import sys
from ckptfs.daemon import cli, control_client
control_client.ControlClient.__init__ = lambda self, path, uid: None
control_client.ControlClient.__exit__ = lambda self, *_: None
def ask(self, request, on_progress=None):
    control_client.encode_request(request)
    return control_client.decode_reply(b'{"ok": true, "result": ' + sys.argv[2].encode() + b'}').result
control_client.ControlClient.ask = ask
from ckptfs.daemon import mounts
mounts._MOUNTINFO = sys.argv[1]
code = cli.run(sys.argv[3:])
print(*sys.modules)
sys.exit(code)
"""
VERSION = '{"name": "v000001", "state": "complete", "step": 7, "number": 1}'


@pytest.mark.parametrize(
    "answer, arguments",
    [
        (VERSION, ("publish", "/mnt/run", "--step", "7", "--tag", "t")),
        (VERSION, ("publish", "/mnt/run", "--json")),
        (VERSION, ("tag", "/mnt/run@1", "good")),
        ("[]", ("log", "/mnt/run")),
        ("{}", ("status", "/mnt", "--json")),
        ("{}", ("du", "/mnt/run", "--json")),
        ('{"corrupt": []}', ("verify", "/mnt/run", "--json")),
        ("[]", ("rollback", "/mnt/run", "/mnt/run2", "--to", "1")),
    ],
)
def test_a_command_that_asks_the_daemon_imports_little(
    tmp_path_factory: pytest.TempPathFactory, answer: str, arguments: tuple[str, ...]
) -> None:
    table = tmp_path_factory.mktemp("table") / "mountinfo"
    table.write_text(
        "26 1 254:0 / / rw - ext4 /dev/vda rw\n"
        f"40 26 0:43 / /mnt rw - fuse.ckptfs /store rw,user_id={os.geteuid()},group_id=0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(table), answer, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.splitlines()[-1].split())
    assert "ckptfs.daemon.control_client" in imported
    assert not HEAVY & imported


def _said(words: tuple[str, ...], *, late: bool) -> object:
    found: list[object] = []
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command()
    def take(
        text: Annotated[str, typer.Argument()],
        more: Annotated[list[str] | None, typer.Argument()] = None,
        number: Annotated[int | None, typer.Option("--number")] = None,
        least: Annotated[int, typer.Option("--least", min=3)] = 3,
        ratio: Annotated[float, typer.Option("--ratio")] = 1,
        key: Annotated[list[str] | None, typer.Option("--key")] = None,
        flag: Annotated[bool, typer.Option("--flag")] = False,
        shout: Annotated[str, typer.Option("--shout", parser=str.upper)] = "a",
    ) -> None:
        found.append((text, more, number, least, ratio, key, flag, shout))

    command = typer.main.get_command(app)
    if late:
        check_late(command)
    try:
        command.main(args=list(words), prog_name="x", standalone_mode=False)
    except typer.TyperException as e:
        return type(e), e.exit_code, e.format_message()
    return found


NUMBERS = ("7", "007", " 7", "7 ", "+7", "-5", "7.0", "7.5", "1_000", "٣", "", "x", "9" * 18, "9" * 40, "0x1")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("",),
        ("a",),
        ("a", "b", "c"),
        ("\udcff",),
        ("a", "--key", "k", "--key", "\udcff"),
        ("a", "--flag"),
        ("a", "--shout", "b"),
        ("a", "--nothing"),
        ("a", "--ratio", "x"),
        *(("a", f"--{name}={word}") for name in ("number", "least", "ratio") for word in NUMBERS),
    ],
)
def test_a_word_means_what_typer_says(words: tuple[str, ...]) -> None:
    assert _said(words, late=True) == _said(words, late=False)
