"""Copies of versions in an object store: FORMAT.md, "Remotes"."""
