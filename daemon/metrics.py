"""The daemon's figures as Prometheus knows them.

One rule: no path and no command line stands in them, and a unit stands there by its id unless the owner
wants names: whoever can reach the address can read it.

A snapshot is taken in the trio thread, in steps; what Prometheus makes of it is made in the thread that
asks. Source: the OpenMetrics names and units; prometheus-client.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ckptfs.fusefs.request_times import BOUNDS_S, RequestTimes
from ckptfs.store.segment_counts import Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFigures:
    """One unit: `name` as it is to be shown; ages in seconds, None where there is no such version.
    `bad_tensors`: those with a NaN or an infinity in the newest version that was looked at. `drill_…` are
    those of its last drill, None if there was none."""

    name: str
    live: bool
    versions: int
    newest_age_s: float | None
    complete_age_s: float | None
    bad_tensors: int | None = None
    drill_age_s: float | None = None
    drill_good: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFigures:
    """One remote: complete versions that wait to be copied there, and what is safe; ages in seconds."""

    name: str
    waiting_versions: int
    waiting_bytes: int
    waiting_age_s: float | None
    newest_safe_age_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is true at one moment. Bytes; `logical_bytes` and `files` were stored since the mount."""

    release: str
    write_path: str
    units: tuple[UnitFigures, ...]
    times: RequestTimes
    stored: Stored
    free_bytes: int
    min_free_bytes: int
    total_bytes: int
    ingest_pending_bytes: int
    digest_pending_bytes: int
    ingested_bytes: int
    ingested_files: int
    versions_made: int
    open_files: int
    kernel_reads: int
    corruptions: int
    scrub_damage: int
    scrub_age_s: float | None
    publish_waiting_s: float
    kept: bool | None
    remotes: tuple[RemoteFigures, ...] = ()


_Value = Callable[[Figures], float | None]
_COUNTERS: tuple[tuple[str, str, _Value], ...] = (
    ("read_bytes", "Bytes that clients read through the daemon.", lambda f: f.times.read_bytes),
    ("written_bytes", "Bytes that clients wrote through the daemon.", lambda f: f.times.written_bytes),
    ("ingested_bytes", "Bytes of files that were taken into the store.", lambda f: f.ingested_bytes),
    ("ingested_files", "Files that were taken into the store.", lambda f: f.ingested_files),
    ("versions_made", "Versions that were published.", lambda f: f.versions_made),
    ("corrupt_chunks", "Stored chunks that did not match their ids when read.", lambda f: f.corruptions),
)
_GAUGES: tuple[tuple[str, str, _Value], ...] = (
    ("stored_bytes", "Unique payload in segments.", lambda f: f.stored.raw_bytes + f.stored.encoded_bytes),
    ("stored_encoded_bytes", "What of it is in encoded segments.", lambda f: f.stored.encoded_bytes),
    ("stored_plain_bytes", "The bytes of the chunks in these.", lambda f: f.stored.plain_bytes),
    ("disk_free_bytes", "Room on the store's disk, without what would give way.", lambda f: f.free_bytes),
    ("disk_total_bytes", "Size of the store's disk.", lambda f: f.total_bytes),
    ("disk_min_free_bytes", "The room that is kept free.", lambda f: f.min_free_bytes),
    ("ingest_pending_bytes", "Closed files that wait for ingest.", lambda f: f.ingest_pending_bytes),
    ("digest_pending_bytes", "Contents that wait for their digests.", lambda f: f.digest_pending_bytes),
    ("publish_waiting_seconds", "Age of the oldest change in no version.", lambda f: f.publish_waiting_s),
    ("open_files", "Inodes that clients have open.", lambda f: f.open_files),
    ("kernel_reads", "Stored files that the kernel reads by itself now.", lambda f: f.kernel_reads),
    (
        "session_kept",
        "1: the mount outlives its daemon; 0: it should, and does not.",
        lambda f: None if f.kept is None else float(f.kept),
    ),
    ("scrub_damage", "Damage that the last scrub found and could not heal.", lambda f: f.scrub_damage),
    ("scrub_age_seconds", "Since the last scrub of the whole store ended.", lambda f: f.scrub_age_s),
)


def families(figures: Figures) -> Iterator[Metric]:
    """All metrics of one snapshot; what is not known is left out."""
    mount = GaugeMetricFamily(
        "ckptfs_mount", "Release and write path of this mount.", labels=["release", "path"]
    )
    mount.add_metric([figures.release, figures.write_path], 1)
    yield mount
    for name, text, value in _COUNTERS:
        yield CounterMetricFamily(f"ckptfs_{name}", text, value=value(figures))
    for name, text, value in _GAUGES:
        if (found := value(figures)) is not None:
            yield GaugeMetricFamily(f"ckptfs_{name}", text, value=found)
    yield from _of_requests(figures.times)
    yield from _of_units(figures.units)
    if figures.remotes:
        yield from _of_remotes(figures.remotes)


def _of_requests(times: RequestTimes) -> Iterator[Metric]:
    took = HistogramMetricFamily(
        "ckptfs_request_duration_seconds", "How long requests of the kernel took.", labels=["kind"]
    )
    errors = CounterMetricFamily(
        "ckptfs_request_errors", "Requests that were answered with an error.", labels=["kind", "errno"]
    )
    for name, kind in sorted(times.kinds.items()):
        counts = [float(count) for count in accumulate(kind.classes)]
        took.add_metric([name], list(zip([*map(str, BOUNDS_S), "+Inf"], counts, strict=True)), kind.total_s)
        for code, count in sorted(kind.errors.items()):
            errors.add_metric([name, errno.errorcode.get(code, str(code))], count)
    yield from (took, errors)


def _of_units(units: Iterable[UnitFigures]) -> Iterator[Metric]:
    labels = ["unit", "live"]
    versions = GaugeMetricFamily("ckptfs_unit_versions", "Versions that a unit has.", labels=labels)
    newest = GaugeMetricFamily("ckptfs_unit_newest_age_seconds", "Age of its newest version.", labels=labels)
    complete = GaugeMetricFamily(
        "ckptfs_unit_complete_age_seconds", "Age of its newest complete version.", labels=labels
    )
    bad = GaugeMetricFamily(
        "ckptfs_unit_bad_tensors",
        "Tensors with NaN or infinity in its newest version.",
        labels=labels,
    )
    drilled = GaugeMetricFamily("ckptfs_unit_drill_age_seconds", "Age of its last drill.", labels=labels)
    good = GaugeMetricFamily("ckptfs_unit_drill_good", "Whether that was good: 1, else 0.", labels=labels)
    for unit in units:
        of = [unit.name, "yes" if unit.live else "no"]
        versions.add_metric(of, unit.versions)
        if unit.newest_age_s is not None:
            newest.add_metric(of, unit.newest_age_s)
        if unit.complete_age_s is not None:
            complete.add_metric(of, unit.complete_age_s)
        if unit.bad_tensors is not None:
            bad.add_metric(of, unit.bad_tensors)
        if unit.drill_age_s is not None and unit.drill_good is not None:
            drilled.add_metric(of, unit.drill_age_s)
            good.add_metric(of, float(unit.drill_good))
    yield from (versions, newest, complete, bad, drilled, good)


def _of_remotes(remotes: Iterable[RemoteFigures]) -> Iterator[Metric]:
    texts = (
        ("waiting_versions", "Complete versions that are not copied there yet.", "waiting_versions"),
        ("waiting_bytes", "The bytes in them, shared ones counted for each.", "waiting_bytes"),
        ("waiting_age_seconds", "Age of the oldest of them.", "waiting_age_s"),
        ("newest_safe_age_seconds", "Age of the newest version that is safe there.", "newest_safe_age_s"),
    )
    for name, text, field in texts:
        family = GaugeMetricFamily(f"ckptfs_remote_{name}", text, labels=["remote"])
        for remote in remotes:
            value: float | None = getattr(remote, field)
            if value is not None:
                family.add_metric([remote.name], value)
        yield family
