"""ZeRO-1 takes optimizers that step any part of a weight by itself, and refuses the others."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="optimizers need torch: pip install bapipe[torch]")

from torch import nn  # noqa: E402

from bapipe.costs.optimizers import is_elementwise  # noqa: E402
from bapipe.errors import BaPipeError  # noqa: E402
from bapipe.torch.inputs.elementwise_steps import require_elementwise  # noqa: E402
from bapipe.torch.inputs.master_weights import MasterWeights  # noqa: E402


class Signs(torch.optim.Optimizer):
    """Goes by the sign of a mean of gradients, element by element."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for item in group["params"]:
                mean = self.state[item].setdefault("mean", torch.zeros_like(item))
                mean.mul_(group["beta"]).add_(item.grad, alpha=1 - group["beta"])
                item.add_(mean.sign(), alpha=-group["lr"])


class Norms(Signs):
    """Divides by the norm of the whole gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for item in group["params"]:
                item.add_(item.grad / item.grad.norm(), alpha=-group["lr"])


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4))]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, Signs])
def test_by_elements(kind: Any) -> None:
    require_elementwise(kind(weights(), lr=0.1))
    require_elementwise(MasterWeights(weights(), lambda own: kind(own, lr=0.1)))


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor, Norms])
def test_by_whole_weights(kind: Any) -> None:
    with pytest.raises(BaPipeError, match="looks at more than one element of a weight at a time"):
        require_elementwise(kind(weights(), lr=0.1))


def test_what_the_planner_knows() -> None:
    assert is_elementwise("adamw(fused=true)")
    assert is_elementwise("torch.optim:RMSprop(momentum=0.9)")
    assert is_elementwise("torch.optim:Muon") is False
    assert is_elementwise("own.module:Lion") is None
