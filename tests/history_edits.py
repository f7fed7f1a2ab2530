"""Ways to edit the history of a store as somebody would who may rewrite its files, and what each is called.

One rule: an edit leaves whole frames; checksums and sequence numbers are made good by whoever writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckptfs.store.digests import DigestsRecord, decode_digests_record
from ckptfs.store.frames import Frame
from ckptfs.store.history import (
    MarkRecord,
    RecordKind,
    State,
    UnitRecord,
    VersionRecord,
    decode_mark,
    decode_unit,
    decode_version,
)
from ckptfs.store.history_check import Fault
from ckptfs.store.ids import UnitId
from ckptfs.store.seal import chained_all, make_seal
from ckptfs.store.signing import SigningKey

OURS, THEIRS = SigningKey(b"o" * 32), SigningKey(b"t" * 32)
Frames = list[tuple[int, bytes]]


class Edit:
    """The frames of `run1`, with the means to find and change them."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames

    def at(self, kind: RecordKind, number: int = 1) -> int:
        """Where the `number`-th version, or else the first record of this kind, stands."""
        for at, (found, payload) in enumerate(self.frames):
            if found == kind and (kind != RecordKind.VERSION or decode_version(payload).number == number):
                return at
        raise AssertionError(kind)

    def version(self, number: int) -> int:
        return self.at(RecordKind.VERSION, number)

    def alter(self, at: int, **fields: object) -> None:
        """Other fields for the record at a place."""
        kind, payload = self.frames[at]
        record: VersionRecord | MarkRecord | UnitRecord
        if kind == RecordKind.VERSION:
            record = replace(decode_version(payload), **fields)  # type: ignore[arg-type]
        elif kind in (RecordKind.UNIT, RecordKind.RENAME):
            record = replace(decode_unit(payload), **fields)  # type: ignore[arg-type]
        else:
            record = replace(decode_mark(payload), **fields)  # type: ignore[arg-type]
        self.frames[at] = (kind, record.encode())

    def cut(self, start: int, count: int) -> Frames:
        """Take frames out; a batch is a record and its seal."""
        taken = self.frames[start : start + count]
        del self.frames[start : start + count]
        return taken

    def reseal(self, unit: UnitId, key: SigningKey) -> None:
        """Make every seal anew."""
        chain = bytes(32)
        records: list[Frame] = []
        for at, (kind, payload) in enumerate(self.frames):
            if kind != RecordKind.SEAL:
                records.append(Frame(kind, 0, payload))
                continue
            head = chained_all(chain, records)
            self.frames[at] = (kind, make_seal(key, unit, chain, len(records), head).encode())
            chain, records = head, []

    def relink(self) -> None:
        """Make the links from version to version right again."""
        link = bytes(32)
        for at, (kind, payload) in enumerate(self.frames):
            if kind == RecordKind.VERSION:
                record = replace(decode_version(payload), before=link)
                self.frames[at] = (kind, record.encode())
                link = record.link()


def alter_state(edit: Edit) -> None:
    edit.alter(edit.version(3), state=State.PARTIAL)


def alter_tree(edit: Edit) -> None:
    edit.alter(edit.version(3), top=decode_version(edit.frames[edit.version(1)][1]).top)


def alter_and_relink(edit: Edit) -> None:
    alter_state(edit)
    edit.relink()


def alter_and_unseal(edit: Edit) -> None:
    alter_state(edit)
    edit.cut(edit.version(3) + 1, 1)


def remove(edit: Edit) -> None:
    edit.cut(edit.version(3), 2)


def remove_and_relink(edit: Edit) -> None:
    remove(edit)
    edit.relink()


def remove_and_renumber(edit: Edit) -> None:
    remove(edit)
    for number in (4, 5):
        edit.alter(edit.version(number), number=number - 1)
    edit.relink()


def remove_only_the_record(edit: Edit) -> None:
    edit.cut(edit.version(3), 1)


def remove_only_the_seal(edit: Edit) -> None:
    edit.cut(edit.version(3) + 1, 1)


def exchange(edit: Edit) -> None:
    fourth = edit.cut(edit.version(4), 2)
    edit.frames[edit.version(3) : edit.version(3)] = fourth


def exchange_only_the_records(edit: Edit) -> None:
    third, fourth = edit.version(3), edit.version(4)
    edit.frames[third], edit.frames[fourth] = edit.frames[fourth], edit.frames[third]


def replay(edit: Edit) -> None:
    edit.frames += edit.frames[edit.version(3) : edit.version(3) + 2]


def renumber_the_newest(edit: Edit) -> None:
    edit.alter(edit.version(5), number=6)


def retag(edit: Edit) -> None:
    edit.alter(edit.at(RecordKind.TAG), number=3)


def untag_by_removal(edit: Edit) -> None:
    edit.cut(edit.at(RecordKind.TAG), 2)


def bring_a_tag_back(edit: Edit) -> None:
    edit.cut(edit.at(RecordKind.UNTAG), 2)


def unpin_by_removal(edit: Edit) -> None:
    edit.cut(edit.at(RecordKind.PIN), 2)


def forget_by_hand(edit: Edit) -> None:
    edit.frames[edit.at(RecordKind.PIN)] = (RecordKind.FORGET, MarkRecord(1, "", 1).encode())


def bring_a_forgotten_version_back(edit: Edit) -> None:
    edit.cut(edit.at(RecordKind.FORGET), 2)


def forget_another(edit: Edit) -> None:
    edit.alter(edit.at(RecordKind.FORGET), number=3)


def move_a_mark(edit: Edit) -> None:
    edit.frames += edit.cut(edit.at(RecordKind.TAG), 2)


def rename_otherwise(edit: Edit) -> None:
    edit.alter(edit.at(RecordKind.RENAME), name=b"run9")


def remove_a_name(edit: Edit) -> None:
    edit.cut(edit.at(RecordKind.RENAME), 2)


def name_it_otherwise_from_the_start(edit: Edit) -> None:
    edit.alter(0, name=b"run9")


def strip_the_seals(edit: Edit) -> None:
    edit.frames[:] = [frame for frame in edit.frames if frame[0] != RecordKind.SEAL]


def strip_the_last_seals(edit: Edit) -> None:
    start = edit.version(4)
    edit.frames[start:] = [frame for frame in edit.frames[start:] if frame[0] != RecordKind.SEAL]


def add_a_mark(edit: Edit) -> None:
    edit.frames.append((RecordKind.FORGET, MarkRecord(4, "", 1).encode()))


def exchange_two_seals(edit: Edit) -> None:
    third, fourth = edit.version(3) + 1, edit.version(4) + 1
    edit.frames[third], edit.frames[fourth] = edit.frames[fourth], edit.frames[third]


def alter_digests(edit: Edit) -> None:
    at = edit.at(RecordKind.DIGESTS)
    said = decode_digests_record(edit.frames[at][1]).contents
    other = {recipe: replace(one, sha256=b"x" * 32) for recipe, one in said.items()}
    edit.frames[at] = (RecordKind.DIGESTS, DigestsRecord(other).encode())


def remove_digests(edit: Edit) -> None:
    edit.cut(edit.at(RecordKind.DIGESTS), 2)


def add_digests(edit: Edit) -> None:
    edit.frames.append(edit.frames[edit.at(RecordKind.DIGESTS)])


EDITS: list[tuple[Callable[[Edit], None], Fault, int | None]] = [
    (alter_state, Fault.ALTERED, 3),
    (alter_tree, Fault.ALTERED, 3),
    (alter_and_relink, Fault.ALTERED, 3),
    (alter_and_unseal, Fault.UNSIGNED, 3),
    (remove, Fault.REMOVED, 3),
    (remove_and_relink, Fault.REMOVED, 3),
    (remove_and_renumber, Fault.ALTERED, 3),
    (remove_only_the_record, Fault.REMOVED, 3),
    (remove_only_the_seal, Fault.UNSIGNED, 3),
    (exchange, Fault.REORDERED, 4),
    (exchange_only_the_records, Fault.ALTERED, 4),
    (replay, Fault.REORDERED, 3),
    (renumber_the_newest, Fault.ALTERED, 6),
    (retag, Fault.ALTERED, None),
    (untag_by_removal, Fault.REMOVED, None),
    (bring_a_tag_back, Fault.REMOVED, None),
    (unpin_by_removal, Fault.REMOVED, None),
    (forget_by_hand, Fault.ALTERED, None),
    (bring_a_forgotten_version_back, Fault.REMOVED, 5),
    (forget_another, Fault.ALTERED, None),
    (move_a_mark, Fault.REORDERED, None),
    (rename_otherwise, Fault.ALTERED, None),
    (remove_a_name, Fault.REMOVED, None),
    (name_it_otherwise_from_the_start, Fault.ALTERED, None),
    (strip_the_seals, Fault.UNSIGNED, 1),
    (strip_the_last_seals, Fault.UNSIGNED, 4),
    (add_a_mark, Fault.UNSIGNED, None),
    (exchange_two_seals, Fault.ALTERED, 3),
    (alter_digests, Fault.ALTERED, None),
    (remove_digests, Fault.REMOVED, 3),
    (add_digests, Fault.UNSIGNED, None),
]
IDS = [edit.__name__ for edit, _, _ in EDITS]
