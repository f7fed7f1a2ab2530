"""A torch distributed checkpoint as several ranks would have written it, without their processes.

The one rule: torch writes every byte of it that a parser reads.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def dcp_save(parts: dict[str, list[tuple[int, torch.Tensor]]]) -> dict[bytes, bytes]:
    """A checkpoint of tensors in parts (first row, rows), of which rank N has written the Nth."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    shards: dict[str, bytes] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for name, some in parts.items():
        for rank, (row, tensor) in enumerate(some):
            file, written = f"__{rank}_0.distcp", io.BytesIO()
            torch.save(tensor.clone(), written)
            at = len(shards.get(file, b""))
            shards[file] = shards.get(file, b"") + written.getvalue()
            offset = torch.Size([row, 0])
            stored[MetadataIndex(name, offset)] = _StorageInfo(file, at, len(written.getvalue()))
    metadata = Metadata(state_dict_metadata={}, storage_data=stored)
    return {
        b".metadata": pickle.dumps(metadata),
        **{file.encode(): content for file, content in shards.items()},
    }
