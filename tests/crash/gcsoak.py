"""The collector beside writers that save old contents again and readers of versions that are about to go.

    python tests/crash/gcsoak.py [--minutes 20] [--seed N] [--json FILE]

One rule: what a file must hold is told by its name (soak_client.py), what the store must hold by a walk that
knows nothing of the collector (storecheck.py beside the daemon, liveset.py at the end).

Half of the time on each write path. A cycle is one `gc`: the policy (keep_last) lets versions go, what they
alone held is taken out and given back. Every few cycles everything that is in the store is read again. At the
end nothing may be missing, and the stored bytes must be those of what is reachable, within 2 %. Prints the
seed first; the same seed makes the same calls, as far as the machine allows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1]))
    from soaking import WRITE_PATHS, soak

    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="ckptfs-gcsoak-", dir=shared) as place:
        results = [
            soak(asked.minutes * 60 / len(WRITE_PATHS), seed, Path(place), write_path, print)
            for write_path in WRITE_PATHS
        ]
    facts = {
        "seed": seed,
        "cycles": sum(one.cycles for one in results),
        "results": [asdict(r) for r in results],
    }
    print(json.dumps(facts, indent=1))
    if asked.json is not None:
        asked.json.write_text(json.dumps(facts, indent=1))
    return 1 if any(one.findings for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
