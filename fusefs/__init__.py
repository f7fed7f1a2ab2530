"""The POSIX face of ckptfs: inodes, namespace, reads and writes, and the kernel session.

Importing it loads the reply extension, which must be there before pyfuse3 is: its symbols have to
come first when the dynamic linker binds pyfuse3's calls.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType


def _load_replies() -> ModuleType | None:
    before = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        from ckptfs.fusefs import _replies
    except ImportError:
        return None
    finally:
        sys.setdlopenflags(before)
    return _replies


REPLIES = _load_replies() if "pyfuse3" not in sys.modules else None
