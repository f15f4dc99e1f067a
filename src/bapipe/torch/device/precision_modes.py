"""A precision on a device: whether the device has it, how fp32 is multiplied, and autocast for forwards alone."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from bapipe.errors import BaPipeError
from bapipe.hardware.precision import Precision

__all__ = ["MixedForward", "set_precision"]

_TF32_FROM = (8, 0)
"""compute capability of the first GPUs that multiply in TensorFloat-32"""


def set_precision(precision: Precision, device: torch.device) -> None:
    """Multiply fp32 values on GPUs as fp32, or as TensorFloat-32 where that is the precision.

    Refuses a precision that the device lacks.
    """
    _require(precision, device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = precision.tf32
        torch.backends.cudnn.allow_tf32 = precision.tf32


def _require(precision: Precision, device: torch.device) -> None:
    if precision.tf32:
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        if capability is None or capability < _TF32_FROM:
            lacks = "a CPU" if capability is None else f"one of {capability[0]}.{capability[1]}"
            raise BaPipeError(
                f"tf32 needs a GPU of compute capability 8.0 or more, and the device here is {lacks}; use "
                "--precision fp32"
            )
    if precision.compute == "bf16" and device.type == "cuda":
        with torch.cuda.device(device):
            supported = torch.cuda.is_bf16_supported(including_emulation=False)
        if not supported:
            other = precision.word.replace("bf16", "fp16")
            raise BaPipeError(
                f"{torch.cuda.get_device_name(device)} does not compute in bf16; use --precision {other}"
            )


class MixedForward:
    """torch.autocast for forwards and losses; backwards run outside of it, in the dtypes that their forwards had.

    autocast keeps what it has cast of a weight, and uses it again, until its outermost region ends. A global batch
    is such a region, so each weight is cast once for all its micro-batches, and their gradients go back through
    the one cast. What is cast without a graph must not be kept: weights would get no gradients through it.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype = dtype
        """what is cast to"""
        self._device = device.type
        # One of each, entered again and again: making one takes longer than entering it.
        self._keeping = torch.autocast(self._device, dtype, cache_enabled=True)
        self._forgetting = torch.autocast(self._device, dtype, cache_enabled=False)

    def batch(self) -> AbstractContextManager[object]:
        """Around all forwards and backwards of a global batch: casts of weights are kept until it ends."""
        return torch.autocast(self._device, self.dtype, enabled=False, cache_enabled=True)

    def forward(self, *, keep: bool = True) -> AbstractContextManager[object]:
        """Around a forward and its loss; not to be nested. `keep`: casts are kept and used again."""
        return self._keeping if keep else self._forgetting
