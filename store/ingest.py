"""Ingest: closed staging files, growing files and metadata objects become chunks of the store.

One rule: a file's chunks are synced before the one change that makes its recipe visible, and its
staging file goes only after the commit of that change. Before it, a crash loses nothing but work.

Large files are adopted, one commit each; small ones, overlays and files that are nearly all known
go into a pack, one commit for many. Source: FORMAT.md, "Segments", write order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import trio

from ckptfs.store.chunk_table import NEXT_SEGMENT, ChunkTable
from ckptfs.store.cutting import CONTENT_WINDOW_BYTES, Fresh
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Unavailable
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.ingest_batch import Batch, CommitFiles, IngestReport, Workshop
from ckptfs.store.ingest_job import Candidate, GrowingJob, Ingested, Outcome, Sibling
from ckptfs.store.packing import Built, remove_segment_files
from ckptfs.store.reclaim import Reclaim
from ckptfs.store.recipe import Recipe
from ckptfs.store.segment_format import segment_paths
from ckptfs.store.segments import Segments
from ckptfs.store.staging import Staging

__all__ = ["Candidate", "CommitFiles", "Ingest", "IngestReport", "Ingested"]
