"""How a client script talks with its test: one JSON object a line, marked, on stdin and stdout.

The mark tells our lines from what the frameworks print.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

MARK = "@ckptfs "


def emit(**fields: object) -> None:
    """Say one thing to the test."""
    sys.stdout.write(f"\n{MARK}{json.dumps(fields)}\n")
    sys.stdout.flush()


def end() -> NoReturn:
    """End a rank, with all said and the process group destroyed. Threads of gloo that are still there abort
    a Python that ends in the usual way now and then (pytorch/pytorch#179291)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def serve(operations: Mapping[str, Callable[..., object]]) -> None:
    """Answer `{"op": name, …arguments}` with `{"result": …}` or `{"error": …}`, until stdin ends."""
    for line in sys.stdin:
        request = json.loads(line)
        operation = operations[request.pop("op")]
        try:
            emit(result=operation(**request))
        except Exception as error:
            emit(error=f"{type(error).__name__}: {error}", errno=getattr(error, "errno", None))
