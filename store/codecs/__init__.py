"""Lossless codecs for tensor bytes: byte planes, differences to an earlier save, casts. Pure.

One rule: what is returned for a chunk is the chunk, shown by its id, or Corrupt. FORMAT.md, "Encoded chunks",
says what the stored bytes are.
"""

from ckptfs.store.codecs.chain import Stored, decode_chunk, decode_chunks
from ckptfs.store.codecs.decoding import Plain, whole
from ckptfs.store.codecs.encoded_chunk import Header, decode_header
from ckptfs.store.codecs.encoding import Encoded, Parent, encode
from ckptfs.store.codecs.entropy import Coder
from ckptfs.store.codecs.kernels import new_block
from ckptfs.store.segment_format import MAX_DEPTH

__all__ = [
    "MAX_DEPTH",
    "Coder",
    "Encoded",
    "Header",
    "Parent",
    "Plain",
    "Stored",
    "decode_chunk",
    "decode_chunks",
    "decode_header",
    "encode",
    "new_block",
    "whole",
]
