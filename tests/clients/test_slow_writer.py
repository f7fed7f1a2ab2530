"""Must show 3: a log written once a second beside single-file saves that take long, with default settings.

Each save is a version within 5 s of its close; none is listed complete before; versions ≤ 2 × saves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
from asking import Version
from clients.clientproc import Client
from clients.recovery import Save, versions_with
from mounting import Mount

WITHIN_S = 5.0
LATER = float("inf")
Figure = Callable[[str, object], None]


@dataclass(frozen=True, slots=True)
class Pace:
    """How the job goes: seconds for a save, and between two saves."""

    saves: int
    save_s: float
    between_s: float

    def arguments(self) -> list[str]:
        pairs = {"--saves": self.saves, "--save-s": self.save_s, "--between-s": self.between_s}
        return [word for name, value in pairs.items() for word in (name, str(value))]


@pytest.mark.parametrize(
    "pace",
    [
        pytest.param(Pace(saves=2, save_s=4, between_s=4), id="4s"),
        pytest.param(
            Pace(saves=3, save_s=60, between_s=10),
            id="60s",
            marks=[pytest.mark.heavy, pytest.mark.timeout(600)],
        ),
    ],
)
def test_each_slow_save_is_a_version_soon_after_its_close_and_not_before(
    mount_factory: Callable[..., Mount], pace: Pace, figure: Figure
) -> None:
    mount = mount_factory(on_tmpfs=True, limit_s=540)
    with Client("slow_run.py", str(mount.path / "run"), *pace.arguments()) as job:
        listed_at = watch(mount, job)
        closed_at = [(close_of(line), float(str(line["at"]))) for line in job.finish()]
    complete = [version for version in mount.versions("run") if version.state == "complete"]
    latencies = []
    for step, (save, closed) in enumerate(closed_at, start=1):
        early = [each for each in of_step(mount, complete, step) if listed_at.get(each.name, LATER) < closed]
        assert not early, f"listed complete while step {step} was being written: {early}"
        holding = versions_with(mount, "run", save)
        whole = [listed_at.get(version.name, LATER) for version in complete if version.name in holding]
        latencies.append(min(whole, default=LATER) - closed)
    figure("seconds from close to version", [round(seconds, 2) for seconds in latencies])
    figure("versions", len(mount.versions("run")))
    assert max(latencies) <= WITHIN_S, f"{latencies}\n{mount.log_tail()}"
    assert len(mount.versions("run")) <= 2 * pace.saves, mount.versions("run")


def watch(mount: Mount, job: Client) -> Mapping[str, float]:
    """When each version was first seen in the listing, until the job has ended."""
    listed_at: dict[str, float] = {}
    while job.is_running():
        for name in mount.version_names("run"):
            listed_at.setdefault(name, time.monotonic())
        time.sleep(0.1)
    return listed_at


def close_of(line: Mapping[str, object]) -> Save:
    """The save that the job reported as closed."""
    assert line["event"] == "closed"
    return Save(str(line["path"]), {"": str(line["sha256"])})


def of_step(mount: Mount, versions: list[Version], step: int) -> list[Version]:
    """Those versions that claim this step or show its file, whatever is in it."""
    name = f"model-step{step}.safetensors"
    return [
        version
        for version in versions
        if version.step == step or (mount.history("run") / version.name / name).exists()
    ]
