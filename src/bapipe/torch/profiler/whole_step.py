"""The whole model at once: what the sum of layers is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.torch.profiler.launch_overhead import StepIssue
from bapipe.torch.profiler.layer_clock import HostClock
from bapipe.torch.profiler.layer_memory import is_out_of_memory, storage_of
from bapipe.torch.profiler.layer_runner import LayerSequence, RunnableLayer, run_once, tensors_of
from bapipe.torch.profiler.measure_settings import ROUNDS
from bapipe.torch.profiler.measurement import WholeStep
from bapipe.torch.profiler.statistics import SampleSummary, Stopping, summarise

__all__ = ["make_gradients", "steps_left", "time_whole"]

_LONG = 0.5
"""seconds of a step from which on the first counts, though nothing warmed it up"""
_DISAGREE = 0.05
"""relative difference of two long steps from which on a third decides"""


def steps_left(times: Sequence[tuple[int, float]], round_: int, *, long: bool) -> int:
    """How often the whole step is still to be timed in this round; `times` are the rounds and seconds so far.

    Twice, before the layers and after them, so that a drift of the machine hits both alike. A long one once,
    halfway through the layers; where the rounds then differ, once more at the end, and the middle one counts.
    """
    here = sum(taken == round_ for taken, _ in times)
    if not long:
        return max(0, 2 - here)
    seconds = [own for _, own in times]
    doubt = len(seconds) == ROUNDS and max(seconds) - min(seconds) > _DISAGREE * min(seconds)
    return 1 if doubt and here else max(0, 1 - here)


def time_whole(
    chain: LayerSequence,
    size: int,
    *,
    units: Sequence[RunnableLayer],
    round_: int,
    stopping: Stopping,
    warmup: int,
) -> WholeStep:
    """Forward and backward of the whole model from idle to idle, as the module itself; of compiled layers, as all
    of them one after another.

    On a CPU, where a step is long, of the measured layers alone if they stand for more. On a GPU also as one
    stage, and how long the host takes to issue each of the `units` within a step: the three
    by turns, so that what slows the machine for a while slows them alike. The allocator's peak of the eager step
    is taken too. The gradients are there and are added to.
    """
    leaves, call = chain.inputs(size)
    device = chain.device

    def eager() -> list[Tensor]:
        return tensors_of(call(leaves))

    if device.type != "cuda":
        step = eager
        if chain.repeats is not None or chain.programs is not None:
            piece = chain.piece(0, len(chain.layers) - 1)
            inputs = [leaves[index] for index in piece.roots]

            def step() -> list[Tensor]:
                return tensors_of(piece.run(*inputs))

        (own,) = _time([_TrainingStep(step)], device, stopping, warmup)
        return WholeStep(microbatch=size, round=round_, chain=own, eager=own, of_model=chain.repeats is None)
    make_gradients(chain.module.parameters())
    piece = chain.whole_model()
    roots = [leaves[index] for index in piece.roots]
    if piece.mixed is not None:
        run_once(piece, roots)
    if chain.programs is not None:  # the module itself is not compiled

        def eager() -> list[Tensor]:
            return tensors_of(piece.run(*roots))

    issue = _fitting(StepIssue(units, leaves), warmup)
    peak, idle = _peak(chain, eager, leaves)
    steps = [_TrainingStep(eager), _TrainingStep(lambda: tensors_of(piece.run(*roots)))]
    own, one = _time(steps, device, stopping, warmup, beside=issue)
    forward, backward = issue.summaries() if issue else ((), ())
    together = steps[1].issued[-one.count :]
    return WholeStep(
        microbatch=size,
        round=round_,
        chain=one,
        eager=own,
        peak=peak,
        idle=idle,
        issue_forward=forward,
        issue_backward=backward,
        issue_together=(summarise([ahead for ahead, _ in together]), summarise([back for _, back in together])),
    )


def _fitting(issue: StepIssue, warmup: int) -> StepIssue | None:
    """The same after a few steps; None where it does not fit: eager does not keep what crosses the cuts."""
    try:
        for _ in range(max(1, warmup)):
            issue(keep=False)
        issue.errors.clear()  # or they would count as memory that nothing explains
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    return issue


def make_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Zeros where there is no gradient yet."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


class _TrainingStep:
    """A forward, and the backward from fixed gradients."""

    def __init__(self, forward: Callable[[], list[Tensor]]) -> None:
        self.forward = forward
        self.errors: list[Tensor] = []
        self.issued: list[tuple[float, float]] = []
        """of every step, seconds until the host had issued the forward, and the backward after it"""

    def __call__(self) -> None:
        begun = time.perf_counter()
        outputs = [value for value in self.forward() if value.requires_grad]
        ahead = time.perf_counter()
        if not self.errors:
            self.errors = [torch.randn_like(value) / max(1, value.numel()) ** 0.5 for value in outputs]
        if outputs:
            torch.autograd.backward(outputs, self.errors)
        self.issued.append((ahead - begun, time.perf_counter() - ahead))


def _time(
    steps: Sequence[_TrainingStep],
    device: torch.device,
    stopping: Stopping,
    warmup: int,
    *,
    beside: StepIssue | None = None,
) -> list[SampleSummary]:
    """Each of the steps by turns, until the first has been sampled often enough."""
    samples: list[list[float]] = [[] for _ in steps]
    clock = HostClock()
    for step in steps:
        for _ in range(warmup):
            step()
    cold = warmup == 0
    begun = time.perf_counter()
    while not stopping.done(samples[0], spent=time.perf_counter() - begun):
        for step, own in zip(steps, samples, strict=True):
            _idle(device)
            clock.begin()
            clock.mark()
            step()
            _idle(device)
            clock.mark()
            taken = clock.read()[0].host
            if not cold or taken >= _LONG:
                own.append(taken)
        if beside is not None:
            _idle(device)
            beside()
        cold = False
    return [summarise(own) for own in samples]


def _idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(chain: LayerSequence, forward: Callable[[], list[Tensor]], leaves: Sequence[Any]) -> tuple[float, float]:
    """(peak, idle): bytes at most during one step; of these what neither state, casts, gradients nor inputs
    explain."""
    device = chain.device
    _idle(device)
    gradients = [item.grad for item in chain.module.parameters() if item.grad is not None]
    known = dict(storage_of(tensor) for tensor in (*chain.state(), *gradients, *tensors_of(list(leaves))))
    casts = 0 if chain.mixed is None else chain.mixed.total
    idle = torch.cuda.memory_allocated(device) - sum(known.values()) - casts
    torch.cuda.reset_peak_memory_stats(device)
    outputs = [value for value in forward() if value.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(value) for value in outputs])
    _idle(device)
    return float(torch.cuda.max_memory_allocated(device)), float(idle)
