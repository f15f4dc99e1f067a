"""Any torch optimizer over fp32 copies of weights of 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.torch.device.tensor_internals import copy_tensors

__all__ = ["MasterWeights"]

_MASTER = "master"
"""name of the copy in a parameter's state"""


class MasterWeights(torch.optim.Optimizer):
    """Keeps an fp32 copy of every weight, steps those with another optimizer, and rounds them into the weights.

    Its groups and the keys of its state are the weights themselves, so it is saved, loaded and scheduled as any
    optimizer is; the state has the copies beside what the other optimizer keeps, all of it in fp32.
    """

    def __init__(
        self, parameters: list[nn.Parameter], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        """`make` makes the optimizer that steps the copies."""
        self._masters = [nn.Parameter(item.detach().float()) for item in parameters]
        self._inner = make(self._masters)
        group = {key: value for key, value in self._inner.param_groups[0].items() if key != "params"}
        super().__init__([{**group, "params": parameters}], {})
        self._weights = parameters
        self._keep()

    @property
    def stepped_by(self) -> torch.optim.Optimizer:
        """The optimizer of the copies."""
        return self._inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of the copies by the weights' gradients. Gradients in fp32 are there for that time only."""
        assert closure is None, "a pipeline's loss is not computed again in a step"
        self._share_options()
        for master, weight in zip(self._masters, self._weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        self._inner.step()
        self._inner.zero_grad(set_to_none=True)
        copy_tensors(self._weights, self._masters)
        self._keep()

    def _share_options(self) -> None:
        """A schedule of the learning rate changes these groups; the other optimizer goes by its own."""
        for own, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in own.items() if key != "params"})

    def _keep(self) -> None:
        """All state under the weights."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            self.state[weight] = {_MASTER: master.detach(), **self._inner.state.get(master, {})}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` returned; of training without copies, which are then made of the weights."""
        saved: dict[int, dict[str, Any]] = state_dict["state"]
        for index, (master, weight) in enumerate(zip(self._masters, self._weights, strict=True)):
            own: Tensor = saved.get(index, {}).get(_MASTER, weight)
            master.copy_(own)
        rest = {
            index: {key: value for key, value in entry.items() if key != _MASTER} for index, entry in saved.items()
        }
        rest = {index: entry for index, entry in rest.items() if entry}
        groups = state_dict["param_groups"]
        self._inner.load_state_dict({"state": rest, "param_groups": groups})
        for own_group, group in zip(self.param_groups, groups, strict=True):
            own_group.update({key: value for key, value in group.items() if key != "params"})
        self._keep()
