"""What a part of a layer computes in place of the whole layer's operators; called from the code of stages."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bapipe.torch.capturing.loss_kinds import ratio

__all__ = [
    "join_loss",
    "join_parts",
    "join_statistics",
    "lstm_direction",
    "lstm_steps",
    "part_dropout",
    "part_statistics",
]


def part_dropout(
    value: Tensor, p: float, train: bool, whole: bool, dim: int, start: int, size: int, order: Sequence[int]
) -> Tensor:
    """Dropout of a slice, with the numbers that the whole would draw: entries `start` on of `size` along `dim`.

    `whole`: of whole channels, as `feature_dropout` does. Numbers are drawn in the order of memory, so the whole's
    is kept: `order` has its dimensions from the slowest to the fastest.
    """
    if not train or p == 0:
        return value
    shape = list(value.shape)
    shape[dim] = size
    ones = torch.ones([shape[item] for item in order], dtype=value.dtype, device=value.device)
    ones = ones.permute([list(order).index(item) for item in range(len(order))])
    mask = torch.feature_dropout(ones, p, True) if whole else functional.dropout(ones, p, True)
    return value * mask.narrow(dim, start, value.shape[dim])


def join_parts(one: Tensor, two: Tensor, dim: int, order: Sequence[int]) -> Tensor:
    """Two slices put together, laid out in memory as the whole would be."""
    together = torch.cat([one.permute(list(order)), two.permute(list(order))], list(order).index(dim))
    return together.contiguous().permute([list(order).index(item) for item in range(len(order))])


class _Statistics(torch.autograd.Function):
    """Log-sum-exp over classes, one class's logit, and the sum; its backward writes the logits' gradient once."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        everything = torch.logsumexp(logits, 1)
        picked = logits.gather(1, index.unsqueeze(1)).squeeze(1) * own
        ctx.save_for_backward(logits, everything, index, own)
        return everything, picked, logits.sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        everything_gradient, picked_gradient, sum_gradient = gradients
        logits, everything, index, own = ctx.saved_tensors
        gradient = torch.exp(logits - everything.unsqueeze(1)).mul_(everything_gradient.unsqueeze(1))
        gradient.scatter_add_(1, index.unsqueeze(1), (picked_gradient * own).unsqueeze(1))
        return gradient.add_(sum_gradient.unsqueeze(1)), None, None


def part_statistics(logits: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the classes `start` on: log-sum-exp, the target's logit (0 if it is not among them), and the sum."""
    mine = (target >= start) & (target < start + logits.shape[1])
    index = torch.where(mine, target - start, torch.zeros_like(target))
    made: tuple[Tensor, Tensor, Tensor] = _Statistics.apply(  # type: ignore[no-untyped-call]
        logits, index, mine.to(logits.dtype)
    )
    return made


def join_statistics(one: Sequence[Tensor], two: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of the classes of both parts."""
    return torch.logaddexp(one[0], two[0]), one[1] + two[1], one[2] + two[2]


def join_loss(
    statistics: Sequence[Tensor], target: Tensor, classes: int, reduction: int, ignored: int, smoothing: float
) -> Tensor:
    """Cross-entropy from the statistics of all classes; `reduction` is 1 for the mean and 2 for the sum."""
    everything, picked, total = statistics
    each = everything - picked
    if smoothing:
        each = (1 - smoothing) * each + smoothing * (everything - total / classes)
    counted = target != ignored
    each = torch.where(counted, each, torch.zeros_like(each))
    return ratio(each.sum(), counted.sum()) if reduction == 1 else each.sum()


def lstm_direction(
    value: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    train: bool,
    batch_first: bool,
    direction: int,
) -> Tensor:
    """One direction of a bidirectional LSTM: 0 forward, 1 backward."""
    time = 1 if batch_first else 0
    given = value.flip(time) if direction else value
    start = [item.narrow(0, direction, 1).contiguous() for item in state]
    made = _lstm(given, start, weights, train, batch_first)[0]
    return made.flip(time) if direction else made


def lstm_steps(
    value: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    train: bool,
    batch_first: bool,
    start: int,
    count: int,
    alone: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Steps `start` on of an LSTM, from the state before them; the state after them comes with the output.

    `alone`: nobody else has the value, which would otherwise be kept whole for the backward of these steps.
    """
    part = value.narrow(1 if batch_first else 0, start, count)
    if alone and torch.is_grad_enabled():
        part = part.clone()
    return _lstm(part, [item.contiguous() for item in state], weights, train, batch_first)


def _lstm(
    value: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], train: bool, batch_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    has_biases = len(weights) == 4
    with warnings.catch_warnings():
        # cuDNN wants all weights in one piece, or copies them: some microseconds, once for every micro-batch.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        made: tuple[Tensor, Tensor, Tensor] = torch.lstm(
            value, list(state), list(weights), has_biases, 1, 0.0, train, False, batch_first
        )
    return made
