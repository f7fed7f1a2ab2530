"""Who looks at `.versions` while the writers work: what it saw listed must be there for ever.

    watcher.py MOUNT OUTPUT SEED

One rule: a line is written only after the whole answer was there. Lines of OUTPUT are JSON:
["listed", unit, version], ["hashed", unit, version, hash of everything in it].
Ends with 0 when the mount is gone.
"""

from __future__ import annotations

import errno
import json
import os
import random
import sys
import time
from typing import TextIO

from livetree import digest_of
from seen import list_units, list_versions, version_digest
from writer import GONE

_PAUSE_S = 0.1


def watch(mount: str, output: TextIO, chance: random.Random) -> None:
    """List and hash until an error comes."""
    listed: set[tuple[str, str]] = set()
    hashed: set[tuple[str, str]] = set()
    while True:
        for unit in list_units(mount):
            for version in list_versions(mount, unit):
                if (unit, version) not in listed:
                    listed.add((unit, version))
                    _write(output, ["listed", unit, version])
        waiting = sorted(listed - hashed)
        if waiting:
            one = chance.choice(waiting[-4:])
            digest = version_digest(mount, *one)
            hashed.add(one)
            _write(output, ["hashed", *one, digest])
        time.sleep(_PAUSE_S)


def _write(output: TextIO, line: list[str]) -> None:
    output.write(json.dumps(line) + "\n")
    output.flush()


def main(arguments: list[str]) -> int:
    """The program."""
    mount, path, seed = arguments
    assert digest_of(b"")
    with open(path, "a") as output:
        try:
            watch(mount, output, random.Random(seed))
        except OSError as e:
            if e.errno in GONE:
                return 0
            print(f"watcher: {e} ({errno.errorcode.get(e.errno or 0)})", file=sys.stderr)
            return 3
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
