"""torch's dtypes by the names that `bapipe.hardware.precision` has for them."""

from __future__ import annotations

import torch

from bapipe.errors import BaPipeError
from bapipe.hardware.precision import WORDS, Precision, find_precision

__all__ = ["autocast_dtype", "weights_dtype"]

_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def weights_dtype(precision: Precision | str) -> torch.dtype:
    """Of parameters in that precision; one that torch does not train in is refused."""
    found = find_precision(precision) if isinstance(precision, str) else precision
    if found.weights not in _DTYPES:
        raise BaPipeError(f"nothing is trained in {found.word} here; use one of {', '.join(WORDS)}")
    return _DTYPES[found.weights]


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """What forwards are cast to in that precision; None: they run in the dtype of the weights."""
    return None if precision.autocast is None else _DTYPES[precision.autocast]
