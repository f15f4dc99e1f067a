"""What cannot be captured says what, got, do this."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import capture_models as models
from bapipe.errors import BaPipeError
from bapipe.torch.capturing import capture
from bapipe.torch.capturing.isolated_run import run_stages


class Root(nn.Module):
    """Runs a given function after a layer."""

    def __init__(self, function) -> None:
        super().__init__()
        self.inner, self.function = models.linear(), function

    def forward(self, value: Tensor) -> Tensor:
        return self.function(self.inner(value))


def raising(value: Tensor) -> Tensor:
    raise ValueError("no such thing" if value.ndim else "")


CASES = {
    "raises": (raising, r"Root fails on its own example: ValueError: no such thing, .*`raise ValueError"),
    "branches": (
        lambda value: value if value.sum() > 0 else -value,
        r"Root cannot be traced: .*data-dependent.*test_capture_errors.py.*move that operation into a submodule",
    ),
    "counts": (
        lambda value: value[: int(value.abs().sum())].sum(),
        r"Root cannot be traced: .*test_capture_errors",
    ),
    "without gradient": (lambda value: value.detach().sum(), "nothing in the model's output has a gradient"),
    "wrong shape": (lambda value: value @ torch.zeros(3, 3), r"Root fails on its own example: RuntimeError: mat1"),
}


@pytest.mark.parametrize("name", CASES)
def test_message(name: str) -> None:
    function, message = CASES[name]
    with pytest.raises(BaPipeError, match=message) as caught:
        capture(Root(function), (torch.randn(2, models.WIDTH),))
    assert "\n" not in str(caught.value)


def test_a_submodule_that_raises_is_named() -> None:
    with pytest.raises(
        BaPipeError, match=r"fails on its own example: ValueError: no such thing, in module 'middle'"
    ):
        capture(models.Around(Root(raising)), (torch.randn(2, models.WIDTH),))


@pytest.mark.parametrize(
    ("module", "args", "message"),
    [
        (models.linear, (), "capture takes an nn.Module, got function"),
        (models.linear(), torch.zeros(2, models.WIDTH), r"args must be a tuple .* got Tensor; write \(x,\)"),
        (models.linear(), (), "hold no tensor"),
        (models.linear(), (torch.zeros(0, models.WIDTH),), "has no samples"),
    ],
)
def test_wrong_arguments(module, args, message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        capture(module, args)


def test_wrong_stages_and_inputs() -> None:
    captured = capture(models.Around(models.Residual()), (torch.randn(2, models.WIDTH),))
    with pytest.raises(BaPipeError, match=r"from layer 0 to 3 at most, got 2 to 9"):
        captured.stage(2, 9)
    with pytest.raises(BaPipeError, match="takes 1 received values and 0 inputs, got 2"):
        captured.stage(1, 1)(torch.zeros(1), torch.zeros(1))
    with pytest.raises(BaPipeError, match="captured with 1 inputs, got 2"):
        run_stages(captured, [], (torch.zeros(1), torch.zeros(1)))
    with pytest.raises(BaPipeError, match="keyword arguments none, got mask"):
        run_stages(captured, [], (torch.zeros(1),), {"mask": None})


def test_nothing_is_printed_when_an_attempt_fails(capfd: pytest.CaptureFixture[str]) -> None:
    capture(models.Around(models.Branching()), (torch.randn(2, models.WIDTH),))
    assert capfd.readouterr() == ("", "")
