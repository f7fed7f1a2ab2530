"""What an installation brings along: units that are alike, a configuration that is what holds, help as pages.

That it installs, runs and goes in a real systemd is for `./dev systemd-test`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest

from ckptfs.daemon.cli_pages import completion, manual, pages
from ckptfs.daemon.config import Config, RemoteConfig, UnitPolicy, parse_config

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "systemd"
EXAMPLE = (ROOT / "examples" / "config.toml").read_text()
COMMANDS = pages()


def directives(name: str) -> list[str]:
    lines = (UNITS / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_both_units_are_one() -> None:
    plain = [
        line.replace("/etc/ckptfs/%i.toml", "/etc/ckptfs/config.toml")
        .replace("%f", "/mnt/ckpt")
        .replace("%i", "mnt-ckpt")
        for line in directives("ckptfs@.service")
    ]
    assert directives("ckptfs.service") == plain


def test_the_example_holds_every_key_and_its_default() -> None:
    assert parse_config(EXAMPLE) == Config(), "as it is it changes nothing"
    uncommented = re.sub(r"(?m)^#(?=\w+ = |\[\[)", "", EXAMPLE)
    table = tomllib.loads(uncommented)
    assert list(table.pop("policy")[0]) == [key for key in UnitPolicy.__struct_fields__ if key != "versions"]
    assert tuple(table.pop("remote")[0]) == RemoteConfig.__struct_fields__
    defaults = msgspec.to_builtins(Config())
    # What is not said unless somebody says it has no value to show.
    assert set(table) == {key for key in defaults if defaults[key] is not None} - {"policy", "remote"}
    assert all(table[key] == defaults[key] or table[key] == list(defaults[key]) for key in table)
    parse_config(uncommented)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples" / "systemd").iterdir()), ids=lambda path: path.name
)
def test_the_example_units_use_what_there_is(path: Path) -> None:
    """Commands and their options; a timer has its service beside it."""
    text = path.read_text()
    if path.suffix == ".timer":
        assert path.with_suffix(".service").exists() and "OnCalendar=" in text
        return
    command = re.search(r"(?m)^ExecStart=/opt/ckptfs/bin/ckptfs (\w+) (.*)$", text)
    assert command is not None
    page = next(one for one in COMMANDS if one.name == command[1])
    known = {name for one in page.options for name in one.names}
    mentioned = set(re.findall(r"--\w[\w-]*", command[2] + text.partition("[Unit]")[0])) - {"--path", "--now"}
    assert mentioned and mentioned <= known, mentioned - known


def test_shell_scripts_are_in_order() -> None:
    for script in (UNITS / "install.sh", ROOT / "tests" / "systemd" / "run.sh", ROOT / "dev"):
        subprocess.run(["sh", "-n", str(script)], check=True, timeout=30)


@pytest.mark.parametrize(
    ("version", "drop_ins"),
    [("252", {"fdstore.conf"}), ("253", {"fdstore.conf", "reload.conf"}), ("257", {"reload.conf"})],
)
def test_what_a_systemd_does_not_say_the_unit_does(tmp_path: Path, version: str, drop_ins: set[str]) -> None:
    """Before 254 it does not tell a service that it keeps its descriptors; behind that only it can say so."""
    script = (
        f'. "{UNITS}/install.sh"; units={tmp_path}; '
        f'systemctl() {{ echo "systemd {version} ({version}.1)"; }}; install_drop_ins ckptfs'
    )
    folder = tmp_path / "ckptfs.service.d"
    folder.mkdir()
    (folder / "fdstore.conf").write_text("of the systemd before")
    subprocess.run(["sh", "-euc", script], check=True, timeout=30)
    assert {path.name for path in folder.iterdir()} == drop_ins
    room = next(line for line in directives("ckptfs.service") if "FileDescriptorStoreMax" in line)
    if "fdstore.conf" in drop_ins:
        said = (folder / "fdstore.conf").read_text()
        assert said == f"[Service]\nEnvironment=FDSTORE={room.partition('=')[2]}\n"


def test_every_command_and_option_is_in_the_manual() -> None:
    text = manual(COMMANDS).replace("\\-", "-")
    for page in COMMANDS:
        section = text.partition(f".SS ckptfs {page.name} ")[2].partition("\n.S")[0]
        assert section, page.name
        for one in page.parameters:
            assert one.names[0] in section, (page.name, one.names)
    assert len(COMMANDS) > 25


@pytest.mark.skipif(shutil.which("man") is None, reason="man is missing: apt-get install man-db")
def test_troff_has_nothing_to_complain_of(tmp_path: Path) -> None:
    page = tmp_path / "ckptfs.1"
    page.write_text(manual(COMMANDS))
    command = ["man", "--warnings=all", "-l", "-P", "cat", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "ckptfs mount MOUNTPOINT" in re.sub(r".\x08", "", done.stdout) and not done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is missing")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["ckptfs", "sta"], ["status"]),
        (["ckptfs", "log", "--ver"], ["--verify"]),
        (["ckptfs", "keys", "ro"], ["rotate"]),
        (["ckptfs", "keys", "rotate", "--k"], ["--key"]),
        (["ckptfs", "log", "here"], ["here1", "here2"]),
        (["ckptfs", "nonsense", "--x"], []),
    ],
)
def test_bash_completes(tmp_path: Path, typed: list[str], offered: list[str]) -> None:
    (tmp_path / "completion").write_text(completion(COMMANDS))
    for name in ("here1", "here2", "there"):
        (tmp_path / name).touch()
    words = " ".join(typed)
    asked = (
        f"COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _ckptfs; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    script = f"set -eu; . ./completion; {asked}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True
    )
    assert sorted(done.stdout.split()) == offered
