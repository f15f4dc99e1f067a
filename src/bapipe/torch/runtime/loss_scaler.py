"""A loss scaler for fp16 whose scale, and whose decision to skip a step, are the same on all ranks.

scaler = pipe.grad_scaler()
for inputs, targets in loader:
    loss = pipe.step(inputs, targets, scaler=scaler)
    scaler.unscale_(optimizer)
    pipe.clip_grad_norm_(1.0)
    scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.torch.device.tensor_internals import multiply_gradients

__all__ = ["LossScaler"]


class LossScaler:
    """Scales the loss, takes the scale out of the gradients again, and skips steps whose gradients overflow.

    Methods and state are those of `torch.amp.GradScaler`, which decides by the gradients of its own rank: here one
    rank's infinite gradient skips the step on all. Every rank calls the same methods in the same order; a rank
    that trains nothing gives None in place of its optimizer.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[nn.Parameter]],
        device: torch.device,
        most: Callable[[float], float],
        *,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        """`parameters` are this rank's; `most` returns the largest of all ranks' numbers, on all ranks."""
        self._parameters, self._device, self._most = parameters, device, most
        self._scale, self._since = init_scale, 0
        self._growth, self._backoff, self._interval = growth_factor, backoff_factor, growth_interval
        self.skipped: bool | None = None
        """whether the gradients of the last step overflowed on some rank; None: not looked at yet"""

    @property
    def divisor(self) -> float:
        """What the gradients still have to be divided by: the scale, or 1 once `unscale_` has been called."""
        return self._scale if self.skipped is None else 1.0

    def get_scale(self) -> float:
        """The factor of the loss."""
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""
        self.skipped = None
        return loss * self._scale

    def unscale_(self, _optimizer: torch.optim.Optimizer | None = None) -> None:
        """Divide all gradients of this rank by the scale, and agree with all ranks on whether one overflowed.

        Called once after a step, before gradients are looked at or clipped; `step` does it where it was not.
        """
        if self.skipped is not None:
            return
        gradients = [item.grad for item in self._parameters() if item.grad is not None]
        overflowed = multiply_gradients(gradients, 1 / self._scale, self._device)
        self.skipped = bool(self._most(float(overflowed)))

    def step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """The optimizer's step, on all ranks or, where a gradient overflowed on one, on none."""
        self.unscale_(optimizer)
        if optimizer is not None and not self.skipped:
            optimizer.step()

    def update(self) -> None:
        """Lower the scale after an overflow; raise it after so many steps without one."""
        assert self.skipped is not None, "update comes after step"
        if self.skipped:
            self._scale, self._since = self._scale * self._backoff, 0
            return
        self._since += 1
        if self._since == self._interval:
            self._scale, self._since = self._scale * self._growth, 0

    def is_enabled(self) -> bool:
        """As torch's."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """As torch's, so that either may load the other's."""
        return {
            "scale": self._scale,
            "growth_factor": self._growth,
            "backoff_factor": self._backoff,
            "growth_interval": self._interval,
            "_growth_tracker": self._since,
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """What `state_dict` returned."""
        self._scale, self._since = float(state_dict["scale"]), int(state_dict["_growth_tracker"])
        self._growth, self._backoff = float(state_dict["growth_factor"]), float(state_dict["backoff_factor"])
        self._interval = int(state_dict["growth_interval"])
