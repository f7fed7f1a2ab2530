"""The promise that client tests end with: what was saved can be had back, byte for byte, from `.versions`.

The one rule: what a save should contain was recorded when it was made, outside the mount.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from asking import CommandLine
from kernelmounts import poll

Digests = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Save:
    """Where a save lay in its unit, and the SHA-256 of each file in it ("" stands for the path itself)."""

    path: str
    files: Digests

    @classmethod
    def of(cls, root: Path, path: str) -> Save:
        """What lies at root/path now, a file or a directory."""
        return cls(path, digest_tree(root / path))


def reported(said: Iterable[Mapping[str, object]]) -> list[Save]:
    """The saves that a client script reported, in order."""
    saves = []
    for line in said:
        if line.get("event") == "saved":
            assert isinstance(line["files"], dict)
            saves.append(Save(str(line["path"]), line["files"]))
    return saves


def digest_tree(root: Path) -> Digests:
    """Relative path → SHA-256 of every file below a directory, or {"": digest} of a file."""
    if root.is_file():
        return {"": digest(root)}
    return {
        str(Path(folder, name).relative_to(root)): digest(Path(folder, name))
        for folder, _, names in os.walk(root)
        for name in names
    }


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions_with(mount: CommandLine, unit: str, save: Save) -> list[str]:
    """Names of the versions that hold this save, whole and unchanged; newest last."""
    return [name for name in mount.version_names(unit) if _holds(mount.history(unit) / name, save)]


def wait_until_recoverable(mount: CommandLine, unit: str, save: Save, timeout_s: float = 20.0) -> str:
    """The name of a version that holds this save."""
    found = poll(lambda: versions_with(mount, unit, save), timeout_s, every_s=0.2)
    if found is None:
        raise AssertionError(_explain(mount, unit, save, timeout_s))
    return found[-1]


def assert_all_recoverable(
    mount: CommandLine, unit: str, saves: Iterable[Save], timeout_s: float = 20.0
) -> None:
    """Every one of these saves is in some version, `timeout_s` from now at the latest."""
    lost = list(saves)
    total = len(lost)

    def all_found() -> bool:
        lost[:] = [save for save in lost if not versions_with(mount, unit, save)]
        return not lost

    if not poll(all_found, timeout_s, every_s=0.2):
        paths = [save.path for save in lost]
        raise AssertionError(
            f"{len(lost)} of {total} lost: {paths}\n" + _explain(mount, unit, lost[0], timeout_s)
        )


def _holds(version: Path, save: Save) -> bool:
    path = version / save.path
    try:
        if set(_names(path)) != set(save.files):
            return False
        return all(digest(path / name if name else path) == want for name, want in save.files.items())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _names(path: Path) -> list[str]:
    if path.is_file():
        return [""]
    return [str(Path(folder, name).relative_to(path)) for folder, _, names in os.walk(path) for name in names]


def _explain(mount: CommandLine, unit: str, save: Save, timeout_s: float) -> str:
    lines = [f"no version of {unit} holds {save.path} within {timeout_s} s; it was {dict(save.files)}"]
    for name in mount.version_names(unit):
        path = mount.history(unit) / name / save.path
        lines.append(f"{name}: {dict(digest_tree(path)) if path.exists() else 'not there'}")
    return "\n".join([*lines, mount.log_tail()])
