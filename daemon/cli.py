"""The command line: `ckptfs COMMAND …`.

One rule: exit 0 for fine, 1 when the check failed or the thing asked for is wrong, 2 for bad usage;
an error is one line on stderr that says what and what to do. A traceback is a bug of ours.

What only some commands need is imported by them, and of the groups of commands the one that is asked for:
`ckptfs log` is to start in a moment.

Source: ARCHITECTURE.md, section 8 (a contract; scripts depend on it).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final

import typer

from ckptfs.daemon.cli_output import Failed, one_line
from ckptfs.daemon.cli_values import check_late
from ckptfs.store.errors import CkptfsError

if TYPE_CHECKING:
    from typer.models import CommandInfo

INTERRUPTED = 130
GROUPS: Final = {
    "cli_lifetime": ("mount", "umount", "rebuild"),
    "cli_versions": ("log", "publish", "tag", "untag", "pin", "unpin", "forget", "rollback", "unit"),
    "cli_checks": ("status", "verify", "diff", "scrub", "du", "gc", "encode"),
    "cli_digests": ("digest", "health", "seal", "check-seal", "export-oms"),
    "cli_keys": ("head", "keys"),
    "cli_proofs": ("prove", "check"),
    "cli_memory": ("expect",),
    "cli_remotes": ("push", "remote"),
    "cli_pull": ("pull",),
    "cli_import": ("import",),
    "cli_drill": ("drill",),
    "cli_doctor": ("doctor",),
}
"""The modules that register commands, in the order of the help, and the commands of each."""


def make_app(wanted: str | None = None) -> typer.Typer:
    """All commands, or only `wanted` if there is one of that name."""
    app = typer.Typer(
        name="ckptfs",
        help="A file system for training checkpoints: every save becomes a version.",
        add_completion=False,
        no_args_is_help=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(lambda: None)  # so that one command alone has a name, too
    has_wanted = any(wanted in commands for commands in GROUPS.values())
    for group, commands in GROUPS.items():
        if wanted in commands or not has_wanted:
            import_module(f"ckptfs.daemon.{group}").register(app)
    if has_wanted:  # each of the others would take as long to make
        app.registered_commands = [one for one in app.registered_commands if _name_of(one) == wanted]
    return app


def _name_of(command: CommandInfo) -> str:
    function = command.callback
    assert function is not None, "a command does something"
    return command.name or typer.main.get_command_name(function.__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """The program: ends the process with its exit code."""
    code = run(sys.argv[1:] if arguments is None else list(arguments))
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Carry out one command; its exit code. Says on stderr what went wrong, if anything did."""
    sys.stdout.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    try:
        command = typer.main.get_command(make_app(arguments[0] if arguments else None))
        check_late(command)
        command.main(args=list(arguments) or ["--help"], prog_name="ckptfs", standalone_mode=False)
    except (Failed, typer.Exit, typer.Abort, typer.TyperException, KeyboardInterrupt) as e:
        return _code_of(e)
    except BrokenPipeError:
        return 1
    except CkptfsError as e:
        return _complain(str(e), 1)
    except OSError as e:
        name = f": {os.fsdecode(e.filename)}" if e.filename else ""
        return _complain(f"{e.strerror or e}{name}", 1)
    return 0


def _code_of(end: BaseException) -> int:
    if isinstance(end, Failed):
        return end.code
    if isinstance(end, typer.Exit):
        return end.exit_code
    if isinstance(end, typer.TyperException):
        return _complain(f"{end.format_message()} (`ckptfs --help` lists what there is)", end.exit_code)
    return INTERRUPTED


def _complain(message: str, code: int) -> int:
    print(f"ckptfs: {one_line(message)}", file=sys.stderr)
    return code
