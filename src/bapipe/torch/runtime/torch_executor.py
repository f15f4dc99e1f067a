"""Runs one rank's lane of a schedule by torch.distributed.pipelining's runtime, on the same captured stages.

torch sends, receives and runs the backwards; forwards, loss and random numbers are those of `StageRunner`, so
losses and gradients are the same. torch keeps a receive buffer for every micro-batch, and every send, to the end
of the global batch, whatever the order needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.exporters.plan_features import without_extras
from bapipe.schedule.actions import Action, Kind, Schedule
from bapipe.schedule.channel_window import evaluation_order
from bapipe.schedule.schedule_file import to_torch_csv
from bapipe.torch.comm import LinkError, P2PChannel, TensorShape
from bapipe.torch.runtime.action_clock import ActionClock
from bapipe.torch.runtime.executor import RankTrace
from bapipe.torch.runtime.pipelining_internals import ComputedStage, TorchOrder, TorchStage, carries_any_value
from bapipe.torch.runtime.plan_checks import compute_lane
from bapipe.torch.stage.error_context import ActionError, described
from bapipe.torch.stage.runner import StageRunner

__all__ = ["Crossing", "TorchExecutor"]

Crossing = Sequence[tuple[TensorShape, bool]]
"""what crosses a boundary for one micro-batch, and whether a gradient comes back for it"""


class TorchExecutor:
    """All stages of one rank, as `Executor`."""

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        runners: Mapping[int, StageRunner],
        *,
        sizes: Sequence[int],
        crossing: Callable[[int], Crossing],
        device: torch.device,
        group: dist.ProcessGroup | None,
        clock: ActionClock,
        on_action: Callable[[Action], None] | None = None,
        on_gradients: Callable[[], None] | None = None,
    ) -> None:
        """`sizes` are the samples of each micro-batch, `crossing` says what crosses a boundary, and `group`
        carries it; the rest is as in `Executor`."""
        self.rank = rank
        self._sizes = tuple(sizes)
        self.current: Action | None = None
        """what is being run, or waited for; None between global batches"""
        self.waiting: P2PChannel | None = None
        """over which channel its input comes, while it is not running"""
        self._schedule = schedule
        self._runners = dict(sorted(runners.items()))
        self._crossing = crossing
        self._device = device
        self._group = group
        self._clock = clock
        self._on_action = on_action
        self._on_gradients = on_gradients
        self._lane = list(compute_lane(without_extras(schedule), rank))
        self._left: list[Action] = []
        """what is to run yet, in reverse"""
        self._marks: list[tuple[Action, Any, Any]] = []
        self._in_flight: dict[int, int] = {}
        self._cause: Exception | None = None
        """what an action raised, before torch put its own error around it"""
        self._split = schedule.parted_stages()
        self._parted = {
            (action.stage, action.microbatch)
            for lane in schedule.lanes
            for action in lane
            if action.kind == Kind.I
        }
        """backwards that are done in two parts"""
        _check_values(schedule, crossing, self._split)
        self._training = self._order(training=True)
        self._evaluation: TorchOrder | None = None

    def run(
        self,
        step: int,
        *,
        inputs: Sequence[Sequence[Any]],
        targets: Sequence[Any],
        training: bool = True,
        sizes: Sequence[int] | None = None,
    ) -> RankTrace | None:
        """One global batch, as `Executor.run`, but as planned. Raises BaPipeError, on all ranks, for another."""
        if sizes is not None and tuple(sizes) != self._sizes:
            raise BaPipeError(
                f"torch's engine takes global batches of {sum(self._sizes)} samples, as planned, got "
                f"{sum(sizes)}; leave short ones out (drop_last=True), or use engine='bapipe'"
            )
        if training:
            order = self._training
        else:
            self._evaluation = order = self._evaluation or self._order(training=False)
        for runner in self._runners.values():
            runner.begin(step, inputs, targets)
        self._in_flight = dict.fromkeys(self._runners, 0)
        self._left = [item for item in reversed(self._lane) if training or item.kind == Kind.F]
        self._marks, self._cause = [], None
        self._clock.start()
        self._advance()
        try:
            order.run()
            if training and self._on_gradients is not None:
                self._on_gradients()
        except Exception as error:
            raise self.failed(error) from error
        for runner in self._runners.values():
            runner.end()
        self.current = self.waiting = None
        return self._trace() if self._clock.traces else None

    def use(self, runners: Mapping[int, StageRunner], form: int | None) -> None:
        """As `Executor.use`; there is one form of the stages."""
        assert form is None, "torch's engine runs sequences of one length"
        assert dict(runners) == self._runners, "its stages are those of the first batch"

    def failed(self, error: Exception) -> ActionError:
        """What to raise where the current action fails, or where a peer does not send its input."""
        cause = self._cause
        if cause is None and isinstance(error, RuntimeError):
            peer = None if self.waiting is None else self.waiting.from_rank
            cause = LinkError(peer, error)
        action = self.current or self._lane[0]
        found = cause or error
        stage = self._runners[action.stage].module
        return ActionError(self.rank, action, found, described(found, stage, microbatch=action.microbatch))

    @property
    def idle(self) -> bool:
        """Whether no global batch is under way."""
        return self.current is None

    def _order(self, *, training: bool) -> TorchOrder:
        stages = [self._stage(index, runner, training=training) for index, runner in self._runners.items()]
        schedule = self._schedule
        if training:
            csv = to_torch_csv(without_extras(schedule))
        else:
            orders = evaluation_order(schedule)
            csv = "\n".join(",".join(map(str, orders[rank])) for rank in range(schedule.num_ranks))
        return TorchOrder(
            stages,
            csv,
            microbatches=schedule.num_microbatches,
            placement=[ranks[0] for ranks in schedule.placement],
            training=training,
        )

    def _stage(self, index: int, runner: StageRunner, *, training: bool) -> TorchStage:
        last = self._schedule.num_stages - 1
        inputs = () if index == 0 else _examples(self._crossing(index - 1), training=training)
        if index < last:
            outputs = _examples(self._crossing(index), training=training)
        else:
            outputs = (torch.empty((), device="meta", requires_grad=True),) if training else ()
        compute = runner.compute if training else runner.evaluate
        return TorchStage(
            ComputedStage(runner.module, compute, split=training and index in self._split and index > 0),
            index=index,
            count=last + 1,
            device=self._device,
            inputs=inputs,
            outputs=outputs,
            group=self._group,
            watch=self._watched,
        )

    @contextlib.contextmanager
    def _watched(self, stage: int, kind: str, microbatch: int) -> Iterator[None]:
        """An action: it is timed, counted and known to the watchdog."""
        action = self._left.pop()
        assert str(action) == f"{stage}{kind}{microbatch}", f"{action} was to run, not {stage}{kind}{microbatch}"
        self.current, self.waiting = action, None
        if self._on_action is not None:
            self._on_action(action)
        start = self._clock.mark()
        try:
            yield
        except Exception as error:
            inner = error.__cause__
            self._cause = inner if isinstance(inner, Exception) else error
            raise
        if self._clock.traces:
            self._marks.append((action, start, self._clock.mark()))
        self._count(action)
        self._advance()

    def _count(self, action: Action) -> None:
        runner = self._runners[action.stage]
        if action.kind == Kind.F:
            self._in_flight[action.stage] += 1
            runner.peak_in_flight = max(runner.peak_in_flight, self._in_flight[action.stage])
        elif action.kind in (Kind.B, Kind.W):
            self._in_flight[action.stage] -= 1

    def _advance(self) -> None:
        """From now on the next action is waited for."""
        if self._left:
            self.current = self._left[-1]
            self.waiting = self._source(self.current)

    def _source(self, action: Action) -> P2PChannel | None:
        """Over which channel an action's input comes, if from another rank."""
        onward = action.kind == Kind.F
        other = action.stage - 1 if onward else action.stage + 1
        if action.kind == Kind.W or not 0 <= other < self._schedule.num_stages:
            return None
        peer = self._schedule.placement[other][0]
        boundary = min(other, action.stage)
        return (
            None
            if peer == self.rank
            else P2PChannel(boundary=boundary, onward=onward, from_rank=peer, to_rank=self.rank)
        )

    def _target(self, action: Action) -> int | None:
        """The rank that an action's result goes to, if another one."""
        other = action.stage + 1 if action.kind == Kind.F else action.stage - 1
        if action.kind == Kind.W or not 0 <= other < self._schedule.num_stages:
            return None
        peer = self._schedule.placement[other][0]
        return None if peer == self.rank else peer

    def _trace(self) -> RankTrace:
        times = iter(self._clock.times([item for _, start, end in self._marks for item in (start, end)]))
        events, sent, arrived = [], {}, {}
        for action, _, _ in self._marks:
            start, end = next(times), next(times)
            events.append((str(action), start, end))
            source, target = self._source(action), self._target(action)
            if source is not None:
                maker = source.boundary if source.onward else source.boundary + 1
                kind = "F" if source.onward else "I" if (maker, action.microbatch) in self._parted else "B"
                arrived[f"{maker}{kind}{action.microbatch}"] = start
            if target is not None:
                sent[str(action)] = (target, end)
        return RankTrace(
            events=tuple(events),
            sent=sent,
            arrived=arrived,
            peak_in_flight={stage: runner.peak_in_flight for stage, runner in self._runners.items()},
        )


def _examples(crossing: Crossing, *, training: bool) -> tuple[Tensor, ...]:
    """What crosses, on the meta device."""
    return tuple(
        torch.empty(about.shape, dtype=about.dtype, device="meta", requires_grad=training and gradient)
        for about, gradient in crossing
    )


def _check_values(schedule: Schedule, crossing: Callable[[int], Crossing], split: frozenset[int]) -> None:
    """Refuse what only a capture knows of; the same on every rank."""
    for boundary in range(schedule.num_stages - 1):
        values = crossing(boundary)
        without = [about for about, gradient in values if not gradient]
        if without and not carries_any_value():
            kind = str(without[0].dtype).removeprefix("torch.")
            raise BaPipeError(
                f"torch {torch.__version__.partition('+')[0]} carries only values with a gradient across a cut, "
                f"and a {kind} one without crosses from stage {boundary} to {boundary + 1}; use --engine bapipe, "
                "or torch 2.13"
            )
        if boundary + 1 in split and all(not gradient for _, gradient in values):
            raise BaPipeError(
                f"no gradient goes back from stage {boundary + 1}, and torch's engine then loses those of its "
                "weights where its backward is in two parts; use --engine bapipe, or plan with --schedule 1f1b-so"
            )
