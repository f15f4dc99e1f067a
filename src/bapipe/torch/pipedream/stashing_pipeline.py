"""`PipeDream`: inter-batch 1F1B with weight stashing (SOSP 2019), to compare synchronous schedules with.

Every micro-batch of the plan is a mini-batch of PipeDream's, with an update of its own; the pipeline drains only
at the end. Stage i (from 0) of N holds N − i micro-batches and as many versions of its weights: a backward uses
those that its forward used, and its update goes into the newest.

    rank 0   F0 F1 F2 B0U F3 B1U F4 B2U …     N = 3; rank 0 starts on micro-batch 3 after one update,
    rank 1      F0 F1 B0U F2 B1U F3 B2U …     rank 1 after two, rank 2 after three
    rank 2         F0 B0U F1 B1U F2 B2U …

With vertical sync a micro-batch has the same version at all stages, stage 0's, and every stage holds N versions.

pipe = PipeDream(build_model, plan="plan.json", loss_fn=loss_fn)
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
trace = pipe.train(batches, optimizer, steps=100)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan
from bapipe.schedule.actions import Action, Kind
from bapipe.torch.capturing import Captured
from bapipe.torch.comm import Inbox, Outbox, guarded
from bapipe.torch.pipedream.stage_channels import StageEnds
from bapipe.torch.pipedream.weight_versions import WeightStash
from bapipe.torch.runtime.gradient_sync import Reducer, TiedWeights
from bapipe.torch.runtime.pipeline import Build, Pipeline
from bapipe.torch.runtime.pipeline_options import PipelineOptions
from bapipe.torch.runtime.plan_checks import RunnablePlan
from bapipe.torch.stage.loss import LossFunction, LossOfEach, loss_of_step
from bapipe.torch.stage.runner import StageRunner

__all__ = ["KEPT_STEPS", "EndlessTrace", "PipeDream"]

KEPT_STEPS = 9
"""of the last so many mini-batches the actions are kept"""
Event = tuple[str, float, float]
"""action, start and end; a backward's end is that of its update"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndlessTrace:
    """What one rank did in a run, in its own clock."""

    losses: tuple[float, ...]
    """of every micro-batch, its own mean; the same on every rank"""
    weights: tuple[float, ...]
    """of every micro-batch, how much it counts in the loss of its mini-batch: samples, or tokens"""
    start: float
    ends: tuple[float, ...]
    """when each of the plan's mini-batches had its last update here"""
    events: dict[int, tuple[Event, ...]]
    """mini-batch -> its actions; those of the last `KEPT_STEPS`"""
    peak_live: int
    """most micro-batches live at once"""
    weight_versions: int
    """most versions of the weights held at once"""


class PipeDream(Pipeline):
    """This rank's stage of a model that PipeDream trains; made on every rank at once, as a `Pipeline` is.

    The plan's schedule is `pipedream`. A weight that several stages hold is refused: each updates by itself, so
    they would drift apart. Running statistics have one version. `evaluate` and the state are a `Pipeline`'s, with
    the newest weights; `step` and what belongs to it are not there, because no mini-batch is waited for.
    """

    _flushes = False

    def __init__(
        self,
        build_model: Build | Captured,
        plan: Plan | RunnablePlan | str | Path,
        loss_fn: LossFunction | None = None,
        *,
        vertical_sync: bool = False,
        checkpoint: str | Path | Mapping[str, Tensor] | None = None,
        options: PipelineOptions | None = None,
        **changes: Any,
    ) -> None:
        """`loss_fn(output, target)` is a mean, a sum, or (sum, count), of each micro-batch by itself.

        `vertical_sync` costs N versions of the weights at every stage, which a plan does not count. The rest is as
        in `Pipeline`.
        """
        super().__init__(build_model, plan, loss_fn, checkpoint=checkpoint, options=options, **changes)
        self.stage = self.stages[0]
        self.vertical_sync = vertical_sync
        self._cap = self._caps[self.stage]
        self.stash = WeightStash(self._parameters, self.lag_of(self.stage))
        self._each = LossOfEach(self._weighing)
        self._ends = StageEnds(self.stage, self._schedule, self._own, self._sizes, self._transport)

    @property
    def _caps(self) -> tuple[int, ...]:
        caps = self._schedule.caps
        assert caps is not None, "check_plan has seen to it"
        return caps

    def lag_of(self, stage: int) -> int:
        """How many updates behind the newest at most the weights are that a stage's micro-batches see."""
        return self._caps[0 if self.vertical_sync else stage] - 1

    def _make_sums(self, users: Mapping[str, tuple[int, ...]]) -> tuple[dict[int, Reducer], TiedWeights]:
        """No rank sums anything with another."""
        tied = next(((name, stages) for name, stages in users.items() if len(stages) > 1), None)
        if tied is not None:
            raise BaPipeError(
                f"'{tied[0]}' is on stages {', '.join(map(str, tied[1]))}, and PipeDream updates every stage by "
                "itself, so they would drift apart; untie it, or plan with 1f1b-so"
            )
        return {}, TiedWeights({}, {})

    def step(self, *_: Any, **__: Any) -> NoReturn:
        """Not there: raises BaPipeError."""
        raise BaPipeError("PipeDream waits for no mini-batch; give them all to train(batches, optimizer, steps=…)")

    def clip_grad_norm_(self, *_: Any, **__: Any) -> NoReturn:
        """Not there: raises BaPipeError."""
        raise BaPipeError(
            "PipeDream's stages update apart, so their gradients have no joint norm; plan with 1f1b-so"
        )

    def train(
        self,
        batches: Iterable[tuple[Any, Any]],
        optimizer: torch.optim.Optimizer | None,
        *,
        steps: int,
        on_update: Callable[[int], None] | None = None,
        on_step: Callable[[int, float, float, float], None] | None = None,
    ) -> EndlessTrace:
        """Train on so many of the plan's mini-batches, with an update after each of their micro-batches.

        Collective: every rank may give the mini-batches as they are, or None in place of what it does not need.
        `optimizer` updates this rank's parameters; None where there are none to update. `on_update(number)` is
        called after each update, with its gradients still in place: there a learning rate may change.
        `on_step(step, loss, seconds, bubble)` is called on rank 0 when a mini-batch has had all its updates; its
        bubble is the share of all ranks' time without compute. Raises RunError where this rank or another fails.
        """
        if steps < 1:
            raise BaPipeError(f"a run needs at least 1 step, got {steps}; raise steps")
        total = steps * len(self._sizes)
        run = _EndlessRun(self, optimizer, total, on_update, on_step)
        with self.watch.guard():
            self.stash.begin(total)
            self._ends.begin(total)
            with self.watch.meeting("ready"), guarded(None):
                dist.barrier()
            trace = run.to_the_end(iter(batches))
        self.steps += steps
        return trace


class _EndlessRun:
    """One run of a stage, from its first forward to its last update."""

    def __init__(
        self,
        pipe: PipeDream,
        optimizer: torch.optim.Optimizer | None,
        total: int,
        on_update: Callable[[int], None] | None,
        on_step: Callable[[int, float, float, float], None] | None,
    ) -> None:
        self._pipe = pipe
        self._optimizer = optimizer
        self._total = total
        self._on_update = on_update
        self._on_step = on_step
        self._ends = pipe._ends
        self._runners: dict[tuple[int, int], StageRunner] = {}
        """(place among those in flight, size) -> who runs it"""
        self._data: dict[int, tuple[list[Any], list[Any]]] = {}
        """micro-batch -> its leaves and target, from when its mini-batch is fetched to its forward"""
        self._marks: list[tuple[int, str, Any, Any]] = []
        self._events: dict[int, list[Event]] = {}
        self._losses: list[tuple[float, float]] = []
        """of every micro-batch, on the last stage: loss and weight"""
        self._finished: list[float] = []
        self._told: deque[tuple[dist.Work | None, Tensor]] = deque()
        self._tag = 2 * pipe._schedule.num_stages + 1
        """above every wire's"""

    def to_the_end(self, batches: Iterator[tuple[Any, Any]]) -> EndlessTrace:
        pipe, executor = self._pipe, self._pipe.executor
        pipe.clock.start()
        self._begun = self._last = time.perf_counter()
        forwards = backwards = peak = 0
        while backwards < self._total:
            if forwards < self._total and forwards - backwards < pipe._cap:
                if forwards not in self._data:
                    self._fetch(forwards, batches)
                self._attempt(self._forward, forwards)
                forwards += 1
                peak = max(peak, forwards - backwards)
            else:
                self._attempt(self._backward, backwards)
                backwards += 1
        self._ends.flush()
        while self._told:
            self._forget_oldest()
        executor.current = None
        assert all(runner.idle for runner in self._runners.values()), "something of the run was kept"
        losses, weights = self._agree_on_losses()
        return EndlessTrace(
            losses=losses,
            weights=weights,
            start=self._begun,
            ends=tuple(self._finished),
            events={step: tuple(events) for step, events in self._events.items()},
            peak_live=peak,
            weight_versions=pipe.stash.peak,
        )

    def _attempt(self, action: Callable[[int], None], number: int) -> None:
        try:
            action(number)
        except Exception as error:
            raise self._pipe.executor.failed(error) from error

    def _forward(self, number: int) -> None:
        pipe = self._pipe
        self._note(number, Kind.F)
        leaves, targets = self._data.pop(number)
        values = self._taken(self._ends.received, number)
        start = pipe.clock.begin_action()
        runner = self._runner(number)
        runner.begin(pipe.steps * len(pipe._sizes) + number, leaves, targets, weights=pipe.stash.weights(number))
        made = runner.forward(0, values)
        self._mark(number, Kind.F, start)
        self._hand_over(self._ends.sent, number, made)

    def _backward(self, number: int) -> None:
        pipe = self._pipe
        self._note(number, Kind.B)
        errors = self._taken(self._ends.errors, number)
        if self._ends.errors is not None and self._ends.sent is not None:
            self._ends.sent.release(number)
        start = pipe.clock.begin_action()
        runner = self._runner(number)
        pipe.stash.forget_gradients()
        made = runner.backward(0, errors)
        runner.end()
        # The stage before waits for it, and for nothing of the update.
        self._hand_over(self._ends.answers, number, made)
        pipe.stash.update(number, self._apply)
        if self._on_update is not None:
            self._on_update(number)
        self._mark(number, Kind.B, start)
        if (number + 1) % len(pipe._sizes) == 0:
            self._close(number // len(pipe._sizes))

    def _apply(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()

    def _fetch(self, number: int, batches: Iterator[tuple[Any, Any]]) -> None:
        """The next mini-batch, cut."""
        pipe, step = self._pipe, number // len(self._pipe._sizes)
        batch = next(batches, None)
        if batch is None:
            wanted = self._total // len(pipe._sizes)
            raise BaPipeError(f"the data ended after {step} of {wanted} mini-batches; lower steps")
        leaves, targets = pipe._cut(*batch)
        for place in range(len(pipe._sizes)):
            self._data[number + place] = (leaves[place : place + 1], targets[place : place + 1])

    def _runner(self, number: int) -> StageRunner:
        pipe = self._pipe
        size = pipe._sizes[number % len(pipe._sizes)]
        key = (number % pipe._cap, size)
        if key not in self._runners:
            last = pipe.stage == pipe._schedule.num_stages - 1
            self._runners[key] = StageRunner(
                pipe.stage,
                {size: pipe._own.stages[pipe.stage][size]},
                sizes=(size,),
                device=pipe.device,
                loss=pipe._each.of_size(size) if last else None,
                output=pipe._own.output if last else None,
            )
        return self._runners[key]

    def _taken(self, inbox: Inbox | None, number: int) -> tuple[Tensor, ...]:
        if inbox is None:
            return ()
        self._pipe.executor.waiting = inbox.wire
        values = inbox.take(number)
        self._pipe.executor.waiting = None
        return values

    def _hand_over(self, outbox: Outbox | None, number: int, values: tuple[Tensor, ...]) -> None:
        if outbox is not None:
            self._pipe.executor.waiting = outbox.wire
            outbox.send(number, values)
            self._pipe.executor.waiting = None

    def _note(self, number: int, kind: Kind) -> None:
        pipe = self._pipe
        step, place = divmod(number, len(pipe._sizes))
        action = Action(pipe.stage, kind, place)
        pipe.executor.current = action
        pipe.watch.progress.step = pipe.steps + step
        pipe.watch.progress.note_action(action)

    def _mark(self, number: int, kind: Kind, start: Any) -> None:
        step, place = divmod(number, len(self._pipe._sizes))
        self._marks.append((step, f"{self._pipe.stage}{kind.name}{place}", start, self._pipe.clock.end_action()))

    def _close(self, step: int) -> None:
        """A mini-batch has had its last update here: know its times, and tell rank 0 how it went."""
        pipe, count = self._pipe, len(self._pipe._sizes)
        times = iter(pipe.clock.times([mark for _, _, start, end in self._marks for mark in (start, end)]))
        for of_step, label, _, _ in self._marks:
            self._events.setdefault(of_step, []).append((label, next(times), next(times)))
        self._marks.clear()
        pipe.clock.start()
        self._events.pop(step - KEPT_STEPS, None)
        self._losses.extend(pipe._each.taken())
        self._finished.append(self._events[step][-1][2])
        own = self._losses[step * count : (step + 1) * count]
        loss = loss_of_step([item for item, _ in own], [weight for _, weight in own])
        busy = sum(end - start for _, start, end in self._events[step])
        totals = self._gather_on_first(torch.tensor([loss, busy], dtype=torch.float64))
        if totals is not None and self._on_step is not None:
            now = time.perf_counter()
            seconds, self._last = now - self._last, now
            bubble = max(0.0, 1 - float(totals[1]) / (dist.get_world_size() * seconds))
            self._on_step(step, float(totals[0]), seconds, bubble)

    def _gather_on_first(self, figures: Tensor) -> Tensor | None:
        """The sum of every rank's figures, on rank 0.

        It is the last to end a mini-batch, so it waits for nobody, and the others need not wait for it.
        """
        with guarded(None):
            if self._pipe.rank:
                self._told.append((dist.isend(figures, 0, tag=self._tag), figures))
                if len(self._told) > self._pipe._schedule.num_stages:
                    self._forget_oldest()
                return None
            part = torch.empty_like(figures)
            for peer in range(1, dist.get_world_size()):
                dist.recv(part, peer, tag=self._tag)
                figures += part
        return figures

    def _forget_oldest(self) -> None:
        work, _ = self._told.popleft()
        assert work is not None
        with guarded(0):
            work.wait()

    def _agree_on_losses(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The last stage's losses and weights, on every rank."""
        found = torch.zeros(self._total, 2, dtype=torch.float64)
        if self._losses:
            found += torch.tensor(self._losses, dtype=torch.float64)
        with self._pipe.watch.meeting("sharing the losses"), guarded(None):
            dist.all_reduce(found)
        return tuple(found[:, 0].tolist()), tuple(found[:, 1].tolist())
