"""What a pickle would build, found without building it.

One rule: nothing is ever imported or called. Opcodes run on a stack of plain values; a global is a
`Global`, a call a `Made` that remembers what was called with what, and an opcode that is not in
the table ends the walk. Steps and bytes are bounded, so that the walk is linear and its memory is
a fixed multiple of the limits, whatever the input.

Source: the opcode documentation in Lib/pickletools.py, whose argument readers are used.
"""

from __future__ import annotations

import io
import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Final

from ckptfs.store.formats.layout import MAX_DIMENSION
from ckptfs.store.formats.pickle_values import Global, Made, Opaque, Pairs, Persistent, Unwalkable

MAX_PICKLE_BYTES: Final = 64 * 1024 * 1024
MAX_STEPS: Final = 2_000_000
"""Some 60,000 tensors of a torch file (32 opcodes each), 1 to 4 s of CPU, 200 MB at the worst."""


@dataclass(slots=True)
class StepBudget:
    """The opcodes that may still be walked for one file; pass it to all walkers of that file."""

    left: int = MAX_STEPS


class Walker:
    """Walks pickles that lie one after the other. Owned by one task."""

    def __init__(self, pickles: bytes, budget: StepBudget) -> None:
        self._stream = io.BytesIO(pickles)
        self._budget = budget

    @property
    def position(self) -> int:
        """The offset of the first byte after the pickles walked so far."""
        return self._stream.tell()

    def next(self) -> object:
        """Return the value of the next pickle. Unwalkable: see the class; the walker is used up."""
        machine = _Machine()
        stream = self._stream
        allowed = self._budget.left
        steps = 0
        try:
            while (code := stream.read(1)) != b".":
                reader, step = _STEPS[code]
                step(machine, reader(stream) if reader is not None else None)
                steps += 1
                if steps > allowed:
                    raise Unwalkable("more steps than the limit")
            return machine.stack.pop()
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, struct.error) as error:
            raise Unwalkable(f"{type(error).__name__} before byte {stream.tell()}") from error
        finally:
            self._budget.left -= steps


class _Machine:
    """The stack, the stacks below the marks, and the memo of one pickle."""

    __slots__ = ("below", "memo", "stack")

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.below: list[list[object]] = []
        self.memo: dict[int, object] = {}

    def pop_to_mark(self) -> list[object]:
        """Return what lies above the last mark and remove it, the mark included."""
        above = self.stack
        self.stack = self.below.pop()
        return above


_Reader = Callable[[IO[bytes]], object]
_Step = Callable[[_Machine, object], None]


def _ignore(machine: _Machine, argument: object) -> None:
    """PROTO and FRAME change nothing here."""


def _push(machine: _Machine, argument: object) -> None:
    machine.stack.append(argument)


def _push_int(machine: _Machine, argument: object) -> None:
    # Arithmetic on an integer of millions of digits would not be linear.
    fits = isinstance(argument, int) and -MAX_DIMENSION <= argument <= MAX_DIMENSION
    machine.stack.append(argument if fits else Opaque.VALUE)


def _push_opaque(machine: _Machine, argument: object) -> None:
    machine.stack.append(Opaque.VALUE)


def _constant(value: object) -> _Step:
    return lambda machine, argument: machine.stack.append(value)


def _mark(machine: _Machine, argument: object) -> None:
    machine.below.append(machine.stack)
    machine.stack = []


def _pop(machine: _Machine, argument: object) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_to_mark()


def _pop_mark(machine: _Machine, argument: object) -> None:
    machine.pop_to_mark()


def _dup(machine: _Machine, argument: object) -> None:
    machine.stack.append(machine.stack[-1])


def _empty_list(machine: _Machine, argument: object) -> None:
    machine.stack.append([])


def _list(machine: _Machine, argument: object) -> None:
    items = machine.pop_to_mark()
    machine.stack.append(items)


def _tuple(machine: _Machine, argument: object) -> None:
    items = machine.pop_to_mark()
    machine.stack.append(tuple(items))


def _tuple_of(count: int) -> _Step:
    def step(machine: _Machine, argument: object) -> None:
        items = machine.stack[-count:]
        if len(items) != count:
            raise Unwalkable("stack underflow")
        machine.stack[-count:] = [tuple(items)]

    return step


def _empty_dict(machine: _Machine, argument: object) -> None:
    machine.stack.append(Pairs())


def _dict(machine: _Machine, argument: object) -> None:
    items = machine.pop_to_mark()
    machine.stack.append(Pairs(zip(items[::2], items[1::2], strict=True)))


def _extend(target: object, values: list[object]) -> None:
    if isinstance(target, Made):
        if target.elements is None:
            target.elements = []
        target.elements += values
    elif isinstance(target, list) and not isinstance(target, Pairs):
        target += values
    elif target is not Opaque.VALUE:
        raise Unwalkable("append to something that is no list")


def _append(machine: _Machine, argument: object) -> None:
    value = machine.stack.pop()
    _extend(machine.stack[-1], [value])


def _appends(machine: _Machine, argument: object) -> None:
    values = machine.pop_to_mark()
    _extend(machine.stack[-1], values)


def _set_pairs(target: object, items: list[object]) -> None:
    pairs = zip(items[::2], items[1::2], strict=True)
    if isinstance(target, Pairs):
        target += pairs
    elif isinstance(target, Made):
        if target.pairs is None:
            target.pairs = Pairs()
        target.pairs += pairs
    elif target is not Opaque.VALUE:
        raise Unwalkable("set an item of something that is no dict")


def _setitem(machine: _Machine, argument: object) -> None:
    value = machine.stack.pop()
    key = machine.stack.pop()
    _set_pairs(machine.stack[-1], [key, value])


def _setitems(machine: _Machine, argument: object) -> None:
    items = machine.pop_to_mark()
    _set_pairs(machine.stack[-1], items)


def _additems(machine: _Machine, argument: object) -> None:
    machine.pop_to_mark()


def _frozenset(machine: _Machine, argument: object) -> None:
    machine.pop_to_mark()
    machine.stack.append(Opaque.VALUE)


def _put(machine: _Machine, argument: object) -> None:
    if not isinstance(argument, int):
        raise Unwalkable("memo index is no integer")
    machine.memo[argument] = machine.stack[-1]


def _memoize(machine: _Machine, argument: object) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _get(machine: _Machine, argument: object) -> None:
    if not isinstance(argument, int):
        raise Unwalkable("memo index is no integer")
    machine.stack.append(machine.memo[argument])


def _global(machine: _Machine, argument: object) -> None:
    module, _, name = str(argument).partition(" ")
    machine.stack.append(Global(module, name))


def _stack_global(machine: _Machine, argument: object) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise Unwalkable("a global whose name is no string")
    machine.stack.append(Global(module, name))


_DICTS: Final = (Global("collections", "OrderedDict"), Global("collections", "defaultdict"))
_TUPLES: Final = (Global("torch", "Size"), Global("builtins", "tuple"), Global("__builtin__", "tuple"))


def _call(called: object, arguments: object) -> object:
    """Return the value of a call: a container for the few plain ones, else a Made."""
    if isinstance(called, Global) and isinstance(arguments, tuple):
        if called in _DICTS and (not arguments or isinstance(arguments[0], Global)):
            return Pairs()
        if called in _TUPLES and len(arguments) == 1 and isinstance(arguments[0], tuple | list):
            # Not a copy: many calls on one long list would not be linear.
            return arguments[0]
    return Made(called, arguments)


def _reduce(machine: _Machine, argument: object) -> None:
    arguments = machine.stack.pop()
    machine.stack.append(_call(machine.stack.pop(), arguments))


def _newobj_ex(machine: _Machine, argument: object) -> None:
    keywords = machine.stack.pop()
    arguments = machine.stack.pop()
    machine.stack.append(Made(machine.stack.pop(), arguments, keywords))


def _obj(machine: _Machine, argument: object) -> None:
    called, *arguments = machine.pop_to_mark()
    machine.stack.append(Made(called, tuple(arguments)))


def _inst(machine: _Machine, argument: object) -> None:
    arguments = tuple(machine.pop_to_mark())
    _global(machine, argument)
    machine.stack.append(_call(machine.stack.pop(), arguments))


def _build(machine: _Machine, argument: object) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if isinstance(target, Made):
        target.state = state


def _persid(machine: _Machine, argument: object) -> None:
    machine.stack.append(Persistent(argument))


def _binpersid(machine: _Machine, argument: object) -> None:
    machine.stack.append(Persistent(machine.stack.pop()))


def _line(stream: IO[bytes]) -> bytes:
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise Unwalkable("no newline at the end of an argument")
    return line[:-1]


def _text_line(stream: IO[bytes]) -> str:
    # The readers of pickletools for these undo escapes, and warn about unknown ones.
    return _line(stream).decode()


def _two_lines(stream: IO[bytes]) -> str:
    return f"{_text_line(stream)} {_text_line(stream)}"


_BY_NAME: Final[dict[str, _Step]] = {
    **dict.fromkeys(("PROTO", "FRAME"), _ignore),
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"), _push_int),
    **dict.fromkeys(("FLOAT", "BINFLOAT", "BINBYTES", "SHORT_BINBYTES"), _push_opaque),
    **dict.fromkeys(("BINBYTES8", "BYTEARRAY8", "EMPTY_SET"), _push_opaque),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE"), _push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _push),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _get),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _reduce),
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "EMPTY_TUPLE": _constant(()),
    "MARK": _mark,
    "POP": _pop,
    "POP_MARK": _pop_mark,
    "DUP": _dup,
    "EMPTY_LIST": _empty_list,
    "LIST": _list,
    "APPEND": _append,
    "APPENDS": _appends,
    "TUPLE": _tuple,
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "EMPTY_DICT": _empty_dict,
    "DICT": _dict,
    "SETITEM": _setitem,
    "SETITEMS": _setitems,
    "ADDITEMS": _additems,
    "FROZENSET": _frozenset,
    "MEMOIZE": _memoize,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "INST": _inst,
    "OBJ": _obj,
    "NEWOBJ_EX": _newobj_ex,
    "BUILD": _build,
    "PERSID": _persid,
    "BINPERSID": _binpersid,
}

_READERS: Final[dict[str, _Reader]] = {
    **dict.fromkeys(("STRING", "FLOAT", "PERSID"), _text_line),
    **dict.fromkeys(("GLOBAL", "INST"), _two_lines),
}


def _steps() -> dict[bytes, tuple[_Reader | None, _Step]]:
    table: dict[bytes, tuple[_Reader | None, _Step]] = {}
    for opcode in pickletools.opcodes:
        if opcode.name in _BY_NAME:
            reader = opcode.arg.reader if opcode.arg is not None else None
            table[opcode.code.encode("latin-1")] = (
                _READERS.get(opcode.name, reader),
                _BY_NAME[opcode.name],
            )
    return table


_STEPS: Final = _steps()
