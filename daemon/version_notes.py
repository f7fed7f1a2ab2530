"""What is known of versions beside their records, as the answers of commands show it. Pure.

One rule: a key that was shown once is always there.
"""

from __future__ import annotations

from ckptfs.daemon.messages import Json
from ckptfs.store.health_records import VersionHealth
from ckptfs.store.merge_record import MergeRecord
from ckptfs.store.writers import WritersRecord


def health_json(found: VersionHealth | None) -> Json:
    """None as long as a version was not looked at."""
    return None if found is None else {**found.total.facts(), "unknown_files": found.unknown}


def writers_json(record: WritersRecord | None) -> dict[str, Json]:
    """The keys `writers` and `other_writers`."""
    writers: list[Json] = [
        {
            "pid": one.pid,
            "uid": one.uid,
            "user": one.user,
            "program": one.program,
            "arguments": list(one.arguments),
            "cgroup": one.cgroup,
            "container": one.container,
            "commit": one.commit,
            "ids": dict(one.ids),
        }
        for one in (record.writers if record is not None else ())
    ]
    return {"writers": writers, "other_writers": record.others if record is not None else 0}


def merge_json(record: MergeRecord | None) -> Json:
    """None for a version that was not merged."""
    if record is None:
        return None
    sources: list[Json] = [
        {
            "node": one.node,
            "unit": one.unit.hex(),
            "of": one.number,
            "link": one.link.hex(),
            "key": one.key or None,
        }
        for one in record.sources
    ]
    return {"sources": sources, "conflicts": list(record.notes)}
