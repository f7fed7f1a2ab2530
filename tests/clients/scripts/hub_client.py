"""huggingface_hub filling its cache: blobs, snapshots of symbolic links, refs, locks.

The environment (HF_ENDPOINT) says where the hub is.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import scan_cache_dir, snapshot_download
from protocol import serve


def fetch(cache: str, repository: str, offline: bool = False) -> str:
    """Bring the newest snapshot into the cache, or find it there; its path."""
    return snapshot_download(repository, cache_dir=cache, local_files_only=offline)


def revisions(cache: str) -> list[str]:
    """The commits that are in the cache, oldest first."""
    found = [each for repository in scan_cache_dir(cache).repos for each in repository.revisions]
    return [each.commit_hash for each in sorted(found, key=lambda each: each.last_modified)]


def remove(cache: str, commit: str) -> None:
    """Take one revision out, with the blobs that no other one needs."""
    scan_cache_dir(cache).delete_revisions(commit).execute()


def links(snapshot: str) -> dict[str, str]:
    """Where each file of a snapshot leads."""
    paths = [path for path in Path(snapshot).rglob("*") if path.is_symlink()]
    return {str(path.relative_to(snapshot)): str(path.readlink()) for path in paths}


if __name__ == "__main__":
    serve({"fetch": fetch, "revisions": revisions, "remove": remove, "links": links})
