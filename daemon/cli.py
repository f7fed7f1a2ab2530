"""The command line: `ckptfs COMMAND …`.

One rule: exit 0 for fine, 1 when the check failed or the thing asked for is wrong, 2 for bad usage;
an error is one line on stderr that says what and what to do. A traceback is a bug of ours.

What only some commands need is imported by them: `ckptfs log` is to start in a moment.

Source: ARCHITECTURE.md, section 8 (a contract; scripts depend on it).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from ckptfs.daemon import (
    cli_checks,
    cli_digests,
    cli_doctor,
    cli_drill,
    cli_import,
    cli_keys,
    cli_lifetime,
    cli_memory,
    cli_proofs,
    cli_pull,
    cli_remotes,
    cli_versions,
)
from ckptfs.daemon.cli_output import Failed, one_line
from ckptfs.store.errors import CkptfsError

INTERRUPTED = 130


def make_app() -> typer.Typer:
    """All commands."""
    app = typer.Typer(
        name="ckptfs",
        help="A file system for training checkpoints: every save becomes a version.",
        add_completion=False,
        no_args_is_help=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    groups = (
        cli_lifetime,
        cli_versions,
        cli_checks,
        cli_digests,
        cli_keys,
        cli_proofs,
        cli_memory,
        cli_remotes,
        cli_pull,
        cli_import,
        cli_drill,
        cli_doctor,
    )
    for group in groups:
        group.register(app)
    return app


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
        typer.main.get_command(make_app()).main(
            args=list(arguments) or ["--help"], prog_name="ckptfs", standalone_mode=False
        )
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
