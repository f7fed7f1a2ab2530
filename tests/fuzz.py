"""Fuzz the decoders for long: `python tests/fuzz.py --minutes 10 [NAME…]`, each NAME that many minutes of CPU
(so that it may run beside other work and be stopped for a while).

Prints a line per decoder: how many inputs, how many were values. Ends with 1 at the first failure, with
the smallest input that shows it. `--list` prints the names; `--together` shares the minutes among all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fuzzing import Decoder, check, decoders, inputs
from hypothesis import HealthCheck, given, seed, settings

_EXAMPLES = 2000


def fuzz(name: str, decoder: Decoder, seconds: float) -> None:
    """Try one decoder for so many seconds of CPU."""
    until = time.process_time() + seconds
    counts: Counter[bool] = Counter()
    turn = 0
    while time.process_time() < until:
        turn += 1

        @seed(time.time_ns())
        @settings(
            max_examples=_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(encoded=inputs(decoder))
        def run(encoded: bytes) -> None:
            if time.process_time() < until:
                counts[check(decoder, encoded)] += 1

        run()
    print(f"{name}: {counts.total()} inputs, {counts[True]} values", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="fuzz the decoders")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("names", nargs="*", metavar="NAME")
    asked = parser.parse_args()
    known = decoders()
    if asked.list:
        print("\n".join(sorted(known)))
        return
    names = asked.names or sorted(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no decoder is called {unknown[0]!r}; --list prints them")
    share = asked.minutes * 60 / (len(names) if asked.together else 1)
    for name in names:
        fuzz(name, known[name], share)


if __name__ == "__main__":
    main()
