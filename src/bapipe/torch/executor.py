"""Runs one rank's lane of a schedule, exactly in its order.

    rank 0   0F0 0F1 0B0 0F2 0B1 0B2 0U      each F sends its output on, each B its error back;
    rank 1       1F0 1B0 1F1 1B1 1F2 1B2 1U  an action starts when its input is there

A micro-batch is live from the start of its F to the end of its B; no more is kept than the order asks for.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Action, Kind, Lane, Schedule
from bapipe.torch.build import Loss
from bapipe.torch.split import TensorShape, overwrites_input
from bapipe.torch.support import lane_of
from bapipe.torch.transport import BACKWARD, FORWARD, WINDOW, Inbox, Outbox

__all__ = ["ActionError", "Links", "StageExecutor", "StepTrace", "actions_of", "connect", "one_line"]


class ActionError(BaPipeError):
    """An action that failed; says which rank, stage and action, and why."""

    def __init__(self, rank: int, action: Action, cause: Exception) -> None:
        self.cause = cause
        super().__init__(f"rank {rank}, stage {action.stage}, action {action}: {one_line(cause)}")


def one_line(error: Exception) -> str:
    """The error on one line; if it is not BaPipe's own, with the place in the code that raised it."""
    line = (str(error).splitlines() or [""])[0][:300]
    if isinstance(error, BaPipeError):
        return line
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if "/torch/" not in frame.filename] or list(frames)
    place = f" ({outside[-1].filename}:{outside[-1].lineno})" if outside else ""
    return f"{type(error).__name__}: {line}{place}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Links:
    """What a stage has to its neighbours; None where there is none."""

    activations_in: Inbox | None
    activations_out: Outbox | None
    errors_in: Inbox | None
    errors_out: Outbox | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """What one rank did in one mini-batch, in its own clock."""

    loss: float
    """of the mini-batch at the last stage, 0 elsewhere"""
    events: tuple[tuple[str, float, float], ...]
    """action, start and end"""
    sent: dict[str, tuple[int, float]]
    """action -> the rank its result went to, and when"""
    arrived: dict[str, float]
    """action of a neighbour -> when its result was in hand"""
    peak_live: int


@dataclass(slots=True)
class _Notes:
    """The growing StepTrace."""

    loss: float = 0.0
    events: list[tuple[str, float, float]] = field(default_factory=list)
    sent: dict[str, tuple[int, float]] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)
    peak_live: int = 0


def actions_of(lane: Lane) -> tuple[Action, ...]:
    """The lane's actions, with the update at its end where the schedule leaves it to the runtime."""
    actions = tuple(lane)
    if any(action.kind == Kind.U for action in actions):
        return actions
    return (*actions, Action(actions[0].stage, Kind.U))


def connect(
    schedule: Schedule,
    stage: int,
    *,
    received: Sequence[TensorShape],
    produced: Sequence[TensorShape],
) -> Links:
    """The links of a stage. `received` and `produced`: each micro-batch's shape at its two boundaries."""
    previous = schedule.placement[stage - 1][0] if stage > 0 else None
    following = schedule.placement[stage + 1][0] if stage + 1 < schedule.num_stages else None
    before, after = dict(enumerate(received)), dict(enumerate(produced))
    return Links(
        activations_in=None
        if previous is None
        else Inbox(previous, FORWARD, _order(schedule, previous, Kind.F), before),
        activations_out=None if following is None else Outbox(following, FORWARD),
        errors_in=None
        if following is None
        else Inbox(following, BACKWARD, _order(schedule, following, Kind.B), after),
        errors_out=None if previous is None else Outbox(previous, BACKWARD, window=WINDOW),
    )


def _order(schedule: Schedule, rank: int, kind: Kind) -> list[int]:
    """In which order a rank makes its results of one kind: the order in which they cross the link."""
    lane = lane_of(schedule, rank)
    return [int(microbatch) for microbatch in lane.microbatches[lane.kinds == kind]]


class StageExecutor:
    """One stage on one rank: runs its actions and holds what is live between them."""

    def __init__(
        self,
        module: nn.Module,
        actions: Sequence[Action],
        links: Links,
        *,
        rank: int,
        weights: Sequence[float],
        loss: Loss,
        optimizer: torch.optim.Optimizer | None,
        on_action: Callable[[Action], None] | None = None,
    ) -> None:
        """`weights` are the micro-batches' shares of the mini-batch: the loss is a mean over all its samples."""
        self.module = module
        self.actions = tuple(actions)
        self._rank = rank
        self._links = links
        self._weights = tuple(weights)
        self._loss = loss
        self._optimizer = optimizer
        self._on_action = on_action
        self._copies_input = links.activations_in is not None and overwrites_input(module)
        self._live: dict[int, tuple[Tensor, Tensor]] = {}
        """micro-batch -> the stage's input and output (at the last stage: the loss)"""

    def run_step(self, inputs: Sequence[Tensor] | None, targets: Sequence[Tensor] | None) -> StepTrace:
        """One mini-batch: gradients of the whole of it, and the update.

        The first stage needs the micro-batches' `inputs`, the last their `targets`. Gradients stay in the
        parameters' `.grad`; nothing else is kept afterwards. Raises ActionError.
        """
        notes = _Notes()
        self.module.zero_grad(set_to_none=True)
        action = self.actions[0]
        try:
            for inbox in (self._links.activations_in, self._links.errors_in):
                if inbox is not None:
                    inbox.begin()
            for action in self.actions:
                if self._on_action is not None:
                    self._on_action(action)
                if action.kind == Kind.F:
                    self._forward(action, notes, inputs, targets)
                elif action.kind == Kind.B:
                    self._backward(action, notes)
                else:
                    self._update(action, notes)
            if self._links.errors_out is not None:
                self._links.errors_out.flush()
        except Exception as error:
            raise ActionError(self._rank, action, error) from error
        assert self.idle, "something of this mini-batch was kept"
        return StepTrace(
            loss=notes.loss,
            events=tuple(notes.events),
            sent=notes.sent,
            arrived=notes.arrived,
            peak_live=notes.peak_live,
        )

    @property
    def idle(self) -> bool:
        """Whether nothing of a mini-batch is held: no features, nothing coming and nothing under way."""
        links = self._links
        ends = (links.activations_in, links.activations_out, links.errors_in, links.errors_out)
        return not self._live and all(end is None or end.idle for end in ends)

    def _forward(
        self, action: Action, notes: _Notes, inputs: Sequence[Tensor] | None, targets: Sequence[Tensor] | None
    ) -> None:
        microbatch = _number(action)
        if self._links.activations_in is None:
            assert inputs is not None, "the first stage needs the inputs"
            value = inputs[microbatch]
        else:
            value = self._links.activations_in.take(microbatch).requires_grad_()
            notes.arrived[f"{action.stage - 1}F{microbatch}"] = time.perf_counter()
        start = time.perf_counter()
        output = self.module(value.clone() if self._copies_input else value)
        if self._links.activations_out is None:
            assert targets is not None, "the last stage needs the targets"
            output = self._weighted_loss(output, targets[microbatch], self._weights[microbatch])
            notes.loss += float(output.detach())
        end = time.perf_counter()
        notes.events.append((str(action), start, end))
        self._live[microbatch] = (value, output)
        notes.peak_live = max(notes.peak_live, len(self._live))
        if self._links.activations_out is not None:
            self._links.activations_out.send(microbatch, output.detach())
            notes.sent[str(action)] = (self._links.activations_out.peer, end)

    def _weighted_loss(self, output: Tensor, target: Tensor, weight: float) -> Tensor:
        loss = self._loss(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise BaPipeError(
                f"the loss must be one number, the mean over the samples; got {type(loss).__name__}"
                f"{f' of shape {tuple(loss.shape)}' if isinstance(loss, Tensor) else ''}"
            )
        return loss.reshape(()) * weight

    def _backward(self, action: Action, notes: _Notes) -> None:
        microbatch = _number(action)
        error = None
        if self._links.errors_in is not None:
            error = self._links.errors_in.take(microbatch)
            notes.arrived[f"{action.stage + 1}B{microbatch}"] = time.perf_counter()
            if self._links.activations_out is not None:
                self._links.activations_out.release(microbatch)
        start = time.perf_counter()
        value, output = self._live[microbatch]
        if output.requires_grad:
            torch.autograd.backward(output, error)
        del output, self._live[microbatch]
        end = time.perf_counter()
        notes.events.append((str(action), start, end))
        if self._links.errors_out is not None:
            gradient = torch.zeros_like(value) if value.grad is None else value.grad
            self._links.errors_out.send(microbatch, gradient)
            notes.sent[str(action)] = (self._links.errors_out.peer, end)

    def _update(self, action: Action, notes: _Notes) -> None:
        start = time.perf_counter()
        if self._optimizer is not None:
            self._optimizer.step()
        notes.events.append((str(action), start, time.perf_counter()))


def _number(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch
