"""Inputs of the model on their way to a stage's device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Upload"]


class Upload:
    """Copies tensors to a device, on a GPU while it computes.

    A plain copy from pageable memory waits until all that is queued is done, and the host with it. From pinned
    memory on a stream of its own it takes place beside what is queued, and only what is queued later waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, value: Tensor) -> Tensor:
        """The value on the device; itself if it is there already."""
        if self._stream is None or value.is_cuda:
            return value.to(self._device)
        pinned = value if value.is_pinned() else value.pin_memory()
        with torch.cuda.stream(self._stream):
            here = pinned.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        here.record_stream(computing)
        return here
