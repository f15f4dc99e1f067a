"""One run of a PipeDream stage, from its first forward to its last optimizer step."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Action, Kind
from bapipe.torch.comm import Inbox, Outbox, guarded
from bapipe.torch.pipedream.stage_channels import StageChannels
from bapipe.torch.pipedream.weight_versions import WeightVersions
from bapipe.torch.runtime.nonfinite import NonFinite
from bapipe.torch.runtime.rank_engine import Engine
from bapipe.torch.stage.loss import LossOfEach, loss_of_step
from bapipe.torch.stage.runner import StageRunner

__all__ = ["KEPT_STEPS", "AsyncHooks", "AsyncRun", "AsyncStage", "EndlessTrace"]

_logger = logging.getLogger(__name__)
KEPT_STEPS = 9
"""of the last so many global batches the actions are kept"""
Event = tuple[str, float, float]
"""action, start and end; a backward's end is that of its optimizer step"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndlessTrace:
    """What one rank did in a run, in its own clock."""

    losses: tuple[float, ...]
    """of every micro-batch, its own mean; the same on every rank"""
    weights: tuple[float, ...]
    """of every micro-batch, how much it counts in the loss of its global batch: samples, or tokens"""
    start: float
    """when the run began"""
    ends: tuple[float, ...]
    """when each of the plan's global batches had its last optimizer step here; where nothing is traced, when the
    host had queued it"""
    events: dict[int, tuple[Event, ...]]
    """global batch -> its actions; those of the last `KEPT_STEPS`. Empty where nothing is traced"""
    peak_in_flight: int
    """most micro-batches in flight at once"""
    weight_versions: int
    """most versions of the weights held at once"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AsyncStage:
    """A stage that trains without a pause, with all that its run takes beside the engine."""

    number: int
    """the stage's"""
    in_flight: int
    """most micro-batches in flight at once"""
    versions: WeightVersions
    """of its weights"""
    losses: LossOfEach
    """of the micro-batches; the last stage's are used"""
    channels: StageChannels
    """to the stages before and after it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncHooks:
    """What is called while a run goes on."""

    on_update: Callable[[int], None] | None
    """after each optimizer step, with the number of its micro-batch"""
    on_step: Callable[[int, float, float, float | None], None] | None
    """on rank 0 after each global batch, with step, loss, seconds and bubble"""


class AsyncRun:
    """A run of so many micro-batches; used once."""

    def __init__(
        self,
        engine: Engine,
        stage: AsyncStage,
        optimizer: torch.optim.Optimizer | None,
        total: int,
        hooks: AsyncHooks,
    ) -> None:
        self._engine = engine
        self._stage = stage
        self._channels = stage.channels
        self._optimizer = optimizer
        self._total = total
        self._hooks = hooks
        self._runners: dict[tuple[int, int], StageRunner] = {}
        """(place among those in flight, size) -> who runs it"""
        self._data: dict[int, tuple[Sequence[Any], Sequence[Any]]] = {}
        """micro-batch -> its leaves and target, from when its global batch is fetched to its forward"""
        self._marks: list[tuple[int, str, Any, Any]] = []
        self._events: dict[int, list[Event]] = {}
        self._losses: list[tuple[float, float]] = []
        """of every micro-batch, on the last stage: loss and weight"""
        self._finished: list[float] = []
        self._reports: deque[tuple[dist.Work | None, Tensor]] = deque()
        """figures of global batches that are on their way to rank 0"""
        self._reported = False
        """whether a loss that is not finite was reported"""
        self._tag = 2 * engine.schedule.num_stages + 1
        """above every channel's"""

    def to_the_end(self, batches: Iterator[tuple[Any, Any]]) -> EndlessTrace:
        """Run all micro-batches of the global batches."""
        engine, in_flight = self._engine, self._stage.in_flight
        engine.clock.start()
        self._begun = self._last = time.perf_counter()
        forwards = backwards = peak = 0
        while backwards < self._total:
            if forwards < self._total and forwards - backwards < in_flight:
                if forwards not in self._data:
                    self._fetch(forwards, batches)
                self._attempt(self._forward, forwards)
                forwards += 1
                peak = max(peak, forwards - backwards)
            else:
                self._attempt(self._backward, backwards)
                backwards += 1
        self._channels.flush()
        while self._reports:
            self._forget_oldest()
        engine.executor.current = None
        assert all(runner.idle for runner in self._runners.values()), "something of the run was kept"
        losses, weights = self._agree_on_losses()
        return EndlessTrace(
            losses=losses,
            weights=weights,
            start=self._begun,
            ends=tuple(self._finished),
            events={step: tuple(events) for step, events in self._events.items()},
            peak_in_flight=peak,
            weight_versions=self._stage.versions.peak,
        )

    def _attempt(self, action: Callable[[int], None], number: int) -> None:
        try:
            action(number)
        except Exception as error:
            raise self._engine.executor.failed(error) from error

    def _forward(self, number: int) -> None:
        engine = self._engine
        self._note(number, Kind.F)
        leaves, targets = self._data.pop(number)
        values = self._received(self._channels.activations_in, number)
        start = engine.clock.begin_action()
        runner = self._runner(number)
        weights = self._stage.versions.weights(number)
        runner.begin(engine.steps * len(engine.sizes) + number, leaves, targets, weights=weights)
        made = runner.forward(0, values)
        self._mark(number, Kind.F, start)
        self._send(self._channels.activations_out, number, made)

    def _backward(self, number: int) -> None:
        engine, channels, versions = self._engine, self._channels, self._stage.versions
        self._note(number, Kind.B)
        gradients = self._received(channels.gradients_in, number)
        if channels.gradients_in is not None and channels.activations_out is not None:
            channels.activations_out.release(number)
        start = engine.clock.begin_action()
        runner = self._runner(number)
        versions.forget_gradients()
        made = runner.backward(0, gradients)
        runner.end()
        # The stage before waits for it, and for nothing of the optimizer step.
        self._send(channels.gradients_out, number, made)
        versions.step(number, self._optimizer_step)
        if self._hooks.on_update is not None:
            self._hooks.on_update(number)
        self._mark(number, Kind.B, start)
        if (number + 1) % len(engine.sizes) == 0:
            self._close(number // len(engine.sizes))

    def _optimizer_step(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()

    def _fetch(self, number: int, batches: Iterator[tuple[Any, Any]]) -> None:
        """The next global batch, cut."""
        count = len(self._engine.sizes)
        step = number // count
        batch = next(batches, None)
        if batch is None:
            wanted = self._total // count
            raise BaPipeError(f"the data ended after {step} of {wanted} global batches; lower steps")
        cut = self._engine.cut(*batch)
        leaves, targets = cut.inputs, cut.targets
        if cut.layout is not None and cut.layout.sizes != self._engine.sizes:
            raise BaPipeError(
                f"the batch has {cut.layout.samples} samples, and PipeDream takes whole global batches of "
                f"{sum(self._engine.sizes)}; leave short batches out (drop_last=True)"
            )
        for place in range(count):
            self._data[number + place] = (leaves[place : place + 1], targets[place : place + 1])

    def _runner(self, number: int) -> StageRunner:
        engine, stage = self._engine, self._stage
        size = engine.sizes[number % len(engine.sizes)]
        key = (number % stage.in_flight, size)
        if key not in self._runners:
            self._runners[key] = StageRunner(
                stage.number,
                {size: engine.own.stages[stage.number][size]},
                sizes=(size,),
                device=engine.device,
                loss=stage.losses.of_size(size) if engine.is_last else None,
                output=engine.own.output if engine.is_last else None,
            )
        return self._runners[key]

    def _received(self, inbox: Inbox | None, number: int) -> tuple[Tensor, ...]:
        if inbox is None:
            return ()
        executor = self._engine.executor
        executor.waiting = inbox.channel
        values = inbox.take(number)
        executor.waiting = None
        return values

    def _send(self, outbox: Outbox | None, number: int, values: tuple[Tensor, ...]) -> None:
        if outbox is not None:
            executor = self._engine.executor
            executor.waiting = outbox.channel
            outbox.send(number, values)
            executor.waiting = None

    def _note(self, number: int, kind: Kind) -> None:
        engine = self._engine
        step, place = divmod(number, len(engine.sizes))
        action = Action(self._stage.number, kind, place)
        engine.executor.current = action
        engine.watch.progress.step = engine.steps + step
        engine.watch.progress.note_action(action)

    def _mark(self, number: int, kind: Kind, start: Any) -> None:
        end = self._engine.clock.end_action()
        if self._engine.clock.traces:
            step, place = divmod(number, len(self._engine.sizes))
            self._marks.append((step, f"{self._stage.number}{kind.name}{place}", start, end))

    def _close(self, step: int) -> None:
        """A global batch has had its last optimizer step here: take its times, and send rank 0 its figures."""
        engine, clock, count = self._engine, self._engine.clock, len(self._engine.sizes)
        busy = self._take_times(step) if clock.traces else 0.0
        self._finished.append(self._events[step][-1][2] if clock.traces else time.perf_counter())
        clock.start()
        self._losses.extend(self._stage.losses.taken())
        own = self._losses[step * count : (step + 1) * count]
        loss = loss_of_step([item for item, _ in own], [weight for _, weight in own])
        if engine.is_last and not math.isfinite(loss) and not self._reported:
            self._report(engine.search.look_here(engine.steps + step, loss))
        totals = self._gather_on_first(torch.tensor([loss, busy], dtype=torch.float64))
        if totals is not None and self._hooks.on_step is not None:
            now = time.perf_counter()
            seconds, self._last = now - self._last, now
            idle = 1 - float(totals[1]) / (dist.get_world_size() * seconds)
            self._hooks.on_step(step, float(totals[0]), seconds, max(0.0, idle) if clock.traces else None)

    def _report(self, found: NonFinite) -> None:
        """Only the last stage knows the loss, and nobody waits for it: it says what it sees, once."""
        self._reported = True
        if self._engine.on_nonfinite is not None:
            self._engine.on_nonfinite(found)
        else:
            _logger.warning("%s", found.line)

    def _take_times(self, step: int) -> float:
        """Put the actions since the last global batch among the events; seconds of compute of this one."""
        marks = [mark for _, _, start, end in self._marks for mark in (start, end)]
        times = iter(self._engine.clock.times(marks))
        for of_step, label, _, _ in self._marks:
            self._events.setdefault(of_step, []).append((label, next(times), next(times)))
        self._marks.clear()
        self._events.pop(step - KEPT_STEPS, None)
        return sum(end - start for _, start, end in self._events[step])

    def _gather_on_first(self, figures: Tensor) -> Tensor | None:
        """The sum of every rank's figures, on rank 0.

        It is the last to end a global batch, so it waits for nobody, and the others need not wait for it.
        """
        with guarded(None):
            if self._engine.rank:
                self._reports.append((dist.isend(figures, 0, tag=self._tag), figures))
                if len(self._reports) > self._engine.schedule.num_stages:
                    self._forget_oldest()
                return None
            part = torch.empty_like(figures)
            for peer in range(1, dist.get_world_size()):
                dist.recv(part, peer, tag=self._tag)
                figures += part
        return figures

    def _forget_oldest(self) -> None:
        work, _ = self._reports.popleft()
        assert work is not None
        with guarded(0):
            work.wait()

    def _agree_on_losses(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The last stage's losses and weights, on every rank."""
        found = torch.zeros(self._total, 2, dtype=torch.float64)
        if self._losses:
            found += torch.tensor(self._losses, dtype=torch.float64)
        with self._engine.watch.meeting("sharing the losses"), guarded(None):
            dist.all_reduce(found)
        return tuple(found[:, 0].tolist()), tuple(found[:, 1].tolist())
