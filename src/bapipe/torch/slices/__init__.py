"""One GPU cut into several by CUDA MPS."""

from __future__ import annotations

from bapipe.torch.slices.mps import (
    SLICES_SCHEMA,
    Slices,
    describe,
    even_slices,
    exported,
    slice_environment,
    start,
    status,
    stop,
)

__all__ = [
    "SLICES_SCHEMA",
    "Slices",
    "describe",
    "even_slices",
    "exported",
    "slice_environment",
    "start",
    "status",
    "stop",
]
