"""`kill -9` of the daemon at random moments of a mixed workload, and what is there after each restart.

    python tests/crash/kill9.py [--kills 200] [--seed N] [--json FILE] [--folder DIR] [--kills-per-store 25]

One rule: what must be there is told by the writers' own journals (oracle.py), what is there is looked at
as a client looks (seen.py) and in the store's files (storecheck.py); the daemon is believed nothing.

One round: eight writers and one who watches `.versions` work on the mount; at a moment that chance has
chosen (moments.py) the daemon is killed; the dead mount is taken away, the daemon is started again (one
time in eight it is killed once more while it starts); then everything is checked, and the next round goes
on with the same store. Prints the seed first: the same seed makes the same calls at the same moments, as
far as the machine allows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rounds import RoundResult


def _show(result: RoundResult) -> None:
    start = " +start" if result.killed_at_start else ""
    facts = (
        f"{result.number:4d}  {result.write_path:5s} {result.moment + start:16s} {result.ran_s:5.2f} s  "
        f"{result.calls:5d} calls {result.pending} pending  "
        f"{result.files:4d} files {result.file_bytes / 1e6:6.1f} MB  "
        f"{result.versions:4d} versions {result.tags:2d} tags  restart {result.restart_s:4.1f} s"
    )
    print(facts + ("  ok" if not result.findings else ""), flush=True)
    for finding in result.findings:
        print(f"      ! {finding}", flush=True)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--folder", type=Path, default=None, help="default: a new one on /dev/shm")
    parser.add_argument("--kills-per-store", type=int, default=25)
    parser.add_argument("--stop-at-finding", action="store_true")
    asked = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1]))
    from rounds import campaign

    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    place = asked.folder or Path(tempfile.mkdtemp(prefix="ckptfs-kill9-", dir=shared))
    begun = time.monotonic()
    results = campaign(
        asked.kills, seed, place, asked.kills_per_store, show=_show, stop_at_finding=asked.stop_at_finding
    )
    findings = sum(len(result.findings) for result in results)
    by_kind: dict[str, int] = {}
    for result in results:
        by_kind[result.moment] = by_kind.get(result.moment, 0) + 1
    totals = {
        "seed": seed,
        "kills": len(results) + sum(result.killed_at_start for result in results),
        "rounds": len(results),
        "moments": by_kind,
        "calls": sum(result.calls for result in results),
        "unanswered": sum(result.pending for result in results),
        "fsyncs": sum(result.fsyncs for result in results),
        "versions_hashed": sum(result.versions_hashed for result in results),
        "tags": sum(result.tags for result in results),
        "findings": findings,
        "seconds": round(time.monotonic() - begun, 1),
    }
    print(json.dumps(totals, indent=2))
    if asked.json is not None:
        asked.json.write_text(json.dumps({**totals, "results": [asdict(r) for r in results]}, indent=1))
    if not findings and asked.folder is None:
        shutil.rmtree(place, ignore_errors=True)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
