"""Where the tensors lie in the files that training frameworks write. Pure; reads, never unpickles."""

from ckptfs.store.formats.layout import Layout, Reader, Tensor
from ckptfs.store.formats.recognise import parse, parse_content, probe_format

__all__ = ["Layout", "Reader", "Tensor", "parse", "parse_content", "probe_format"]
