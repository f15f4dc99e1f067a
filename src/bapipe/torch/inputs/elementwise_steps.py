"""Whether an optimizer may step a part of a weight by itself: what ZeRO-1 needs of it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from bapipe.costs.optimizers import is_elementwise
from bapipe.errors import BaPipeError
from bapipe.torch.inputs.master_weights import MasterWeights

__all__ = ["require_elementwise"]

_SHAPE, _PARTS, _STEPS = (8, 6), [7, 20, 21], 3
"""a weight, how many of its elements go into each part, and the steps that are compared"""
_CLOSE = 1e-5
"""relative: kernels round the last elements of a tensor in another way"""


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that changes an element of a weight by more than that element's gradient and state.

    Those of torch.optim are known. One of another class is tried: a small weight and its parts must step alike.
    """
    own = optimizer.stepped_by if isinstance(optimizer, MasterWeights) else optimizer
    kind = type(own)
    known = is_elementwise(f"{kind.__module__}:{kind.__qualname__}")
    if known or (known is None and _steps_alike(own)):
        return
    raise BaPipeError(
        f"{kind.__qualname__[:60]} looks at more than one element of a weight at a time, so that its state cannot "
        "be sharded (ZeRO-1); plan with --zero-stage 0, or use an optimizer such as AdamW"
    )


def _steps_alike(optimizer: torch.optim.Optimizer) -> bool:
    kind, taken = type(optimizer), inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in optimizer.param_groups[0].items() if key in taken and key != "params"}
    chance = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=chance)
    try:
        whole = nn.Parameter(start.clone())
        parts = [nn.Parameter(part.clone()) for part in torch.split(start.reshape(-1), _PARTS)]
        both: list[Any] = [kind([whole], **options), kind(parts, **options)]
        for _ in range(_STEPS):
            gradient = torch.randn(_SHAPE, generator=chance)
            whole.grad = gradient.clone()
            for parameter, part in zip(parts, torch.split(gradient.reshape(-1), _PARTS), strict=True):
                parameter.grad = part.clone()
            for one in both:
                one.step()
    except Exception:
        return False
    joined = torch.cat([item.detach() for item in parts]).view(_SHAPE)
    return bool(torch.allclose(whole.detach(), joined, rtol=_CLOSE, atol=0.0))
