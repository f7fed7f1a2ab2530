"""What the words of a command line stand for, found without pydantic where that can add nothing.

One rule: a word means what typer says that it means, and what is wrong with one is said by typer. Taken
without asking are only words that are to be text, and plain decimal numbers.

typer makes what checks a parameter with pydantic when that is first needed, also for one that is not given;
and to import pydantic takes half as long as all else that a command does (measured: 0.06 s of 0.17 s). So
each parameter is given a check that has typer make its own where it cannot do without. Another typer that
knows nothing of that goes on as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from typer import Context
from typer.core import TyperArgument, TyperGroup, TyperOption

if TYPE_CHECKING:
    from typer import _click
    from typer._coercion import RuntimeParam
    from typer.models import ParameterInfo

_MOST_DIGITS = 18


def check_late(command: _click.Command) -> None:
    """Have the values of a command's parameters, and of the commands in it, checked so."""
    for parameter in command.get_params(Context(command)):
        if isinstance(parameter, TyperArgument | TyperOption):
            parameter._runtime_param = cast("RuntimeParam", _Late())
    if isinstance(command, TyperGroup):
        for one in command.commands.values():
            check_late(one)


class _Late:
    """Stands where typer keeps a parameter's check."""

    def coerce(self, value: object, param: TyperArgument | TyperOption, ctx: _click.Context) -> object:
        """What the parameter is, for what the parser found of it."""
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        described = param.type_descriptor
        if described.parameter_info.parser is None:
            if described.annotation is str and isinstance(value, str):
                return value
            if described.annotation == list[str] and _are_texts(value):
                return value
            if described.annotation is int and _is_plain_number(value, described.parameter_info):
                return int(str(value))
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _are_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)


def _is_plain_number(value: object, wanted: ParameterInfo) -> bool:
    if not isinstance(value, str) or (wanted.min, wanted.max) != (None, None):
        return False
    return len(value) <= _MOST_DIGITS and value.isascii() and value.isdigit()
