"""A stage under autocast: its forwards are cast, its backwards are not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bapipe.torch.capturing import capture
from bapipe.torch.device.precision_modes import MixedForward
from bapipe.torch.stage.loss import LossSum
from bapipe.torch.stage.runner import StageRunner

SIZE, COUNT = 2, 3


def test_a_stage_that_recomputes_casts_with_a_graph_first() -> None:
    """autocast keeps what the first forward has cast, and gradients of all micro-batches go back through it."""
    modes: list[tuple[bool, bool]] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return nn.functional.mse_loss(output, target)

    module, inputs = nn.Linear(4, 3), torch.randn(SIZE * COUNT, 4)
    captured = capture(module, (inputs[:SIZE],), {})
    sizes, mixed = [SIZE] * COUNT, MixedForward(torch.device("cpu"), torch.bfloat16)
    sums = LossSum(loss, sizes)
    runner = StageRunner(
        0,
        {SIZE: captured.stage(0, len(captured.layers) - 1)},
        sizes=sizes,
        recompute=True,
        loss=sums,
        output=captured.output,
        mixed=mixed,
    )
    for _ in range(2):
        modes.clear()
        sums.begin()
        runner.begin(0, [[item] for item in inputs.split(SIZE)], [torch.zeros(SIZE, 3)] * COUNT)
        with mixed.batch():
            for number in range(COUNT):
                runner.forward(number, ())
            for number in range(COUNT):
                runner.again(number)
                runner.backward(number, ())
        runner.end()
        assert modes == [(True, True), (False, True), (False, True), *[(True, True)] * COUNT]
    assert all(item.grad is not None and bool(item.grad.any()) for item in module.parameters())
