"""This process's device."""

from __future__ import annotations

import torch

__all__ = ["take_device"]


def take_device(device: torch.device) -> None:
    """Make a GPU the current device of this thread and of the thread that computes backwards; nothing on a CPU.

    A backward runs in a thread of autograd's own. It has no CUDA context where an earlier backward, of a capture
    on the CPU, started it before CUDA was in use; cuBLAS then warns "there was no current CUDA context" at the
    first matrix product. The backward of one number gives that thread its context beforehand.
    """
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    with torch.enable_grad():
        number = torch.ones((), device=device, requires_grad=True)
        torch.autograd.backward(number * 2)
