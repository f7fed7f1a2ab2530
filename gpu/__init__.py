"""Verification in device memory. The CPU defines the answer; a device only has to equal it.

    from ckptfs import gpu
    report = gpu.verify(model, "/mnt/ckpt/run1@latest")

Nothing is imported before it is called: neither torch, nor PyCUDA, nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptfs.gpu.expected import Expectation
    from ckptfs.gpu.report import Refusal, Report
    from ckptfs.store.health import Health


def verify(tensors: object, version: str | Expectation, *, prefix: str | None = None) -> Report:
    """Whether the bytes of tensors in memory are those of a version; they are hashed where they lie.

    `tensors`: a torch module, or a state dict of torch tensors or numpy arrays, nested or not, on the CPU
    or on CUDA devices; of a DTensor this rank's part. `version`: "PATH@VERSION" on a mount here, or what
    `ckptfs expect` printed, read with `parse_expectation`. `prefix`: what the names
    in the version begin with ("model."); None: it is found out.

    Every tensor is reported as verified, corrupt (in which bytes, of which chunk) or not verifiable (and
    why); nothing is changed. Unavailable: no daemon answers, or there is no such version. Unsupported: a
    device of the tensors cannot be used, with what to install. InvalidRequest: `tensors` is neither of
    the two, or several prefixes fit.
    """
    from ckptfs.gpu.verifying import verify_tensors

    return verify_tensors(tensors, version, prefix=prefix)


def health_of(tensors: object) -> dict[str, Health | Refusal]:
    """NaNs, infinities, subnormals and values too large for FP16 or BF16 of each tensor, where it lies.

    `tensors` as for `verify`, on the CPU; of what cannot be looked at it is said why. InvalidRequest if it
    is neither a module nor a state dict.
    """
    from ckptfs.gpu.tensor_health import health_of as looked_at

    return looked_at(tensors)


def parse_expectation(text: str | bytes) -> Expectation:
    """What `ckptfs expect` printed, for `verify`; InvalidRequest if it is none."""
    from ckptfs.gpu.expected import parse_expectation as parse

    return parse(text)


__all__ = ["health_of", "parse_expectation", "verify"]
