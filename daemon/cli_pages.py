"""The manual page and the completion for bash, made from the commands' own help.

One rule: nothing is said here that the help does not say, so neither can be out of date.

`python -m ckptfs.daemon.cli_pages man|completion` writes one to stdout. Source: man(7), bash(1).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import typer

from ckptfs.daemon.cli import make_app


class _Parameter(Protocol):
    param_type_name: str
    opts: Sequence[str]
    metavar: str | None
    name: str | None
    required: bool
    nargs: int


class _Command(Protocol):
    help: str | None
    params: Sequence[_Parameter]


@dataclass(frozen=True, slots=True)
class Parameter:
    """An option or an argument. `value` is the word for what it takes, "" for a switch."""

    names: tuple[str, ...]
    value: str
    text: str
    is_option: bool
    is_required: bool
    is_many: bool


@dataclass(frozen=True, slots=True)
class Page:
    """What the help says of one command; `name` has two words for a command of a group."""

    name: str
    text: str
    parameters: tuple[Parameter, ...]

    @property
    def options(self) -> tuple[Parameter, ...]:
        """Those that begin with `--`."""
        return tuple(one for one in self.parameters if one.is_option)


def pages() -> list[Page]:
    """All commands, in the order of the help."""
    return list(_pages_of(cast("object", typer.main.get_command(make_app())), ""))


def manual(commands: Sequence[Page]) -> str:
    """The manual page, as troff."""
    lines = [
        '.TH CKPTFS 1 "" "" "User Commands"',
        ".SH NAME",
        r"ckptfs \- a file system for training checkpoints: every save becomes a version",
        ".SH SYNOPSIS",
        r".B ckptfs",
        r"\fICOMMAND\fR [\fIOPTION\fR...] [\fIARGUMENT\fR...]",
        ".SH COMMANDS",
    ]
    for page in commands:
        lines += [f".SS {_troff(_usage(page))}", *_paragraphs(page.text)]
        for one in page.parameters:
            head = ", ".join(one.names) + (f" {one.value}" if one.value and one.is_option else "")
            lines += [".TP", f".B {_troff(head)}", _troff(one.text)]
    lines += [
        ".SH EXIT STATUS",
        "0: fine. 1: a check failed, or the thing asked for is wrong; one line on stderr says what and what",
        "to do. 2: bad usage.",
    ]
    return "\n".join(lines) + "\n"


def completion(commands: Sequence[Page]) -> str:
    """The completion for bash. Where a path is wanted it completes paths."""
    groups: dict[str, list[str]] = {}
    for page in commands:
        group, _, word = page.name.partition(" ")
        if word:
            groups.setdefault(group, []).append(word)
    first = " ".join(dict.fromkeys(page.name.partition(" ")[0] for page in commands))
    lines = [
        "# Made by `python -m ckptfs.daemon.cli_pages completion`.",
        "_ckptfs() {",
        '    local word=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]:-} words="" only=""',
        "    COMPREPLY=()",
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f'        words="{first} --help" only=yes',
        "    else",
        '        case "$command ${COMP_WORDS[2]:-}" in',
    ]
    for page in sorted(commands, key=lambda page: " " not in page.name):
        options = " ".join(name for one in page.options for name in one.names)
        pattern = f'"{page.name}"' if " " in page.name else f'"{page.name} "*'
        lines.append(f'            {pattern}) words="{options} --help" ;;')
    lines += ["        esac"]
    for group, members in groups.items():
        given = f'words="{" ".join(members)} --help" only=yes'
        lines.append(f'        [ "$command $COMP_CWORD" != "{group} 2" ] || {given}')
    lines += [
        "    fi",
        '    if [ -n "$only" ] || [ "${word:0:1}" = - ]; then',
        '        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")',
        "    else",
        '        mapfile -t COMPREPLY < <(compgen -f -- "$word")',
        "    fi",
        "}",
        "complete -o filenames -F _ckptfs ckptfs",
    ]
    return "\n".join(lines) + "\n"


def _pages_of(command: object, name: str) -> Iterator[Page]:
    members = cast("Mapping[str, object] | None", getattr(command, "commands", None))
    if members is not None:
        for word, member in members.items():
            yield from _pages_of(member, f"{name} {word}".strip())
        return
    known = cast(_Command, command)
    yield Page(name, known.help or "", tuple(_parameter(one) for one in known.params))


def _parameter(one: _Parameter) -> Parameter:
    is_option = one.param_type_name == "option"
    is_switch = bool(getattr(one, "is_flag", False))
    value = "" if is_switch else one.metavar or (one.name or "").upper()
    names = tuple(one.opts) if is_option else (value,)
    return Parameter(
        names, value, getattr(one, "help", None) or "", is_option, bool(one.required), one.nargs != 1
    )


def _usage(page: Page) -> str:
    words = [f"ckptfs {page.name}"]
    for one in page.parameters:
        word = f"{one.names[0]} {one.value}".strip() if one.is_option else one.value
        words.append(word + (" ..." if one.is_many else "") if one.is_required else f"[{word}]")
    return " ".join(words)


def _paragraphs(text: str) -> Iterator[str]:
    for at, paragraph in enumerate(text.split("\n\n")):
        if at:
            yield ".PP"
        yield _troff(" ".join(paragraph.split()))


def _troff(text: str) -> str:
    """`text` so that troff shows it as it is."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return r"\&" + escaped if escaped.startswith((".", "'")) else escaped


if __name__ == "__main__":
    makers = {"man": manual, "completion": completion}
    if sys.argv[1:2] == [] or sys.argv[1] not in makers:
        sys.exit("usage: python -m ckptfs.daemon.cli_pages man|completion")
    sys.stdout.write(makers[sys.argv[1]](pages()))
