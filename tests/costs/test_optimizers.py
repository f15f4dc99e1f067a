"""One table of optimizers serves the planner, the profiler and the run."""

from __future__ import annotations

import pytest
import torch

from bapipe.costs.optimizers import OPTIMIZERS, find_optimizer
from bapipe.errors import BaPipeError
from bapipe.planner import Request
from bapipe.torch.inputs.make_optimizer import make_optimizer
from command import bapipe


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_is_what_torch_keeps(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = make_optimizer(name, [weight], rate=0.1)
    assert optimizer is not None
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert sum(value.numel() == weight.numel() for value in kept if value is not None) == OPTIMIZERS[name].state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_planner_takes_each(name: str) -> None:
    assert Request(optimizer=name).optimizer == name


def test_planning_for_adamw_is_planning_for_adam() -> None:
    plans = [
        bapipe("plan", "gpt2", "--cluster", "4xv100", "--optimizer", name, "--json") for name in ("adam", "adamw")
    ]
    assert [plan.returncode for plan in plans] == [0, 0]
    assert plans[0].stdout == plans[1].stdout


def test_an_unknown_optimizer_is_refused_with_the_nearest() -> None:
    with pytest.raises(BaPipeError, match=r"unknown optimizer 'adamm'.*did you mean 'adam'"):
        find_optimizer("adamm")
