"""An optimizer over fp32 copies of 16-bit weights does what it does with fp32 weights, and is saved with them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from bapipe.costs.optimizers import find_optimizer
from bapipe.errors import BaPipeError
from bapipe.torch.inputs.make_optimizer import make_optimizer, require_optimizer
from bapipe.torch.inputs.master_weights import MasterWeights

CLASSES = ("sgd", "momentum", "adam", "adamw(fused=true)", "torch.optim:RMSprop")


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).bfloat16()) for size in ((4, 3), (5,))]


def gradients(step: int, like: list[nn.Parameter]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    return [1e-3 * torch.randn(item.shape, generator=generator).bfloat16() for item in like]


def masters(name: str) -> str:
    return f"{name[:-1]},master_weights=true)" if name.endswith(")") else f"{name}(master_weights=true)"


def made(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    found = make_optimizer(name, parameters, rate=1e-4)
    assert found is not None
    return found


def train(optimizer: torch.optim.Optimizer, own: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for item, gradient in zip(own, gradients(step, own), strict=True):
            item.grad = gradient.to(item.dtype)
        optimizer.step()


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_steps_the_copies(name: str) -> None:
    own, full = weights(), [nn.Parameter(item.detach().float()) for item in weights()]
    optimizer = made(masters(name), own)
    train(optimizer, own, range(20))
    train(made(name, full), full, range(20))
    for item, wanted in zip(own, full, strict=True):
        assert torch.equal(optimizer.state[item]["master"], wanted)
        assert torch.equal(item, wanted.bfloat16())
        assert all(
            value.dtype == torch.float32 for value in optimizer.state[item].values() if value.is_floating_point()
        )
        assert item.grad is not None
        assert item.grad.dtype == torch.bfloat16


def test_without_copies_small_steps_are_lost() -> None:
    own, kept = weights(), weights()
    optimizer = made(masters("sgd"), kept)
    train(made("sgd", own), own, range(50))
    train(optimizer, kept, range(50))
    assert all(torch.equal(item, before) for item, before in zip(own, weights(), strict=True))
    assert not torch.equal(optimizer.state[kept[0]]["master"], weights()[0].float())


@pytest.mark.parametrize("name", CLASSES)
def test_a_saved_state_goes_on_the_same(name: str) -> None:
    own = weights()
    optimizer = made(masters(name), own)
    train(optimizer, own, range(10))
    other = [nn.Parameter(item.detach().clone()) for item in own]
    resumed = made(masters(name), other)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, own, range(10, 20))
    train(resumed, other, range(10, 20))
    for item, wanted in zip(other, own, strict=True):
        assert torch.equal(resumed.state[item]["master"], optimizer.state[wanted]["master"])
        assert torch.equal(item, wanted)


def test_a_state_without_copies_makes_them_of_the_weights() -> None:
    own = weights()
    plain = made("adam", own)
    train(plain, own, range(3))
    resumed = made(masters("adam"), own)
    resumed.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert torch.equal(resumed.state[own[0]]["master"], own[0].float())
    assert resumed.state[own[0]]["exp_avg"].dtype == torch.float32


def test_a_schedule_of_the_rate_reaches_the_copies() -> None:
    own = weights()
    optimizer = made(masters("sgd"), own)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    train(optimizer, own, range(1))
    scheduler.step()
    before = optimizer.state[own[0]]["master"].clone()
    train(optimizer, own, range(1, 3))
    assert torch.equal(optimizer.state[own[0]]["master"], before)


def test_the_planned_bytes_are_those_that_it_keeps() -> None:
    own = [nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))]
    optimizer = made(masters("adam"), own)
    train(optimizer, own, range(1))
    kept = sum(value.nbytes for value in optimizer.state[own[0]].values() if value.numel() == 1000)
    assert kept == find_optimizer(masters("adam"), 2).state * own[0].nbytes


def test_options_that_a_class_does_not_take_are_one_line() -> None:
    assert isinstance(made(masters("adam"), weights()), MasterWeights)
    require_optimizer("adamw(fused=true,weight_decay=0.1)")
    with pytest.raises(BaPipeError, match=r"the optimizer 'sgd\(beta=1\)' cannot be made: .*; correct it"):
        require_optimizer("sgd(beta=1)")
