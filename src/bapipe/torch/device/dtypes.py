"""Number formats by the names that profiles and plans have for them."""

from __future__ import annotations

import torch

from bapipe.errors import BaPipeError, nearest

__all__ = ["DTYPES", "find_dtype"]

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "tf32": torch.float32,
}
"""tf32 is fp32 multiplied in TensorFloat-32"""


def find_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name."""
    if name not in DTYPES:
        raise BaPipeError(f"unknown dtype '{name[:60]}'{nearest(name, DTYPES)}; use one of {', '.join(DTYPES)}")
    return DTYPES[name]
