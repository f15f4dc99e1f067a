"""Runs one rank's lane of a schedule, exactly in its order.

    rank 0   0F0 0F1 0B0 0F2 0B1 0B2      each F sends activations on, each B gradients back;
    rank 1       1F0 1B0 1F1 1B1 1F2 1B2  an action starts when its input is there

No more is kept than the order asks for: saved activations from F to B, a message until it is delivered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from bapipe.schedule.actions import Action, Kind, Schedule
from bapipe.schedule.channel_window import evaluation_order
from bapipe.torch.comm import Inbox, Message, Outbox, P2PChannel, Transport
from bapipe.torch.runtime.action_clock import ActionClock
from bapipe.torch.runtime.gradient_sync import Reducer
from bapipe.torch.runtime.plan_checks import compute_lane
from bapipe.torch.stage.error_context import ActionError, described
from bapipe.torch.stage.runner import StageRunner

__all__ = ["Executor", "RankTrace"]

MessageOf = Callable[[int, int, bool], Message]
"""(boundary, micro-batch, onward) -> what crosses"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """What one rank did in one global batch, in its own clock."""

    events: tuple[tuple[str, float, float], ...]
    """action, start and end; waiting for its input is not part of it"""
    sent: dict[str, tuple[int, float]]
    """action -> the rank its result went to, and when"""
    arrived: dict[str, float]
    """action of another rank -> when its result was used at the earliest"""
    peak_in_flight: dict[int, int]
    """stage -> most micro-batches in flight at once"""

    @property
    def computed(self) -> float:
        """Seconds in which the rank computed; waits and all-reduces are none."""
        return sum(end - start for action, start, end in self.events if not action.endswith("A"))

    def shifted(self, by: float) -> RankTrace:
        """The same in a clock that shows so many seconds more."""
        return replace(
            self,
            events=tuple((action, start + by, end + by) for action, start, end in self.events),
            sent={action: (peer, at + by) for action, (peer, at) in self.sent.items()},
            arrived={action: at + by for action, at in self.arrived.items()},
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _Step:
    """An action with all that running it takes."""

    action: Action
    label: str
    runner: StageRunner
    microbatch: int
    source: Inbox | None = None
    """where its input comes from, if from another rank"""
    source_label: str = ""
    handed: tuple[int, bool, int] | None = None
    """the key of its input, if it comes from a stage of this rank"""
    target: Outbox | None = None
    target_key: tuple[int, bool, int] | None = None
    released: Outbox | None = None
    """whose message the input answers"""
    reducer: Reducer | None = None
    """set on the last gradient of a stage with replicas"""


class Executor:
    """All stages of one rank."""

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        runners: Mapping[int, StageRunner],
        transport: Transport,
        *,
        messages: MessageOf,
        reducers: Mapping[int, Reducer],
        clock: ActionClock,
        on_action: Callable[[Action], None] | None = None,
        on_gradients: Callable[[], None] | None = None,
    ) -> None:
        """`messages` says what crosses; `on_action` is called before each action, `on_gradients` when the last one
        that makes gradients is queued."""
        self.rank = rank
        self._on_action = on_action
        self._on_gradients = on_gradients
        self.current: Action | None = None
        """what is being run; None between global batches"""
        self.waiting: P2PChannel | None = None
        """over which channel it waits: for its input, or for a peer to take what it sent"""
        self._schedule = schedule
        self._runners = dict(runners)
        self._transport = transport
        self._messages = messages
        self._reducers = reducers
        self._clock = clock
        self._inboxes: dict[P2PChannel, Inbox] = {}
        self._outboxes: dict[P2PChannel, Outbox] = {}
        self._handed: dict[tuple[int, bool, int], tuple[Tensor, ...]] = {}
        self._split = {
            (action.stage, action.microbatch)
            for lane in schedule.lanes
            for action in lane
            if action.kind == Kind.I
        }
        """backwards that are done in two parts"""
        self._forwards: dict[int, list[Action]] | None = None
        """every rank's in an evaluation, once there is one"""
        count = schedule.num_microbatches
        self._form: int | None = None
        self._programs: dict[tuple[int | None, bool, int], list[_Step]] = {
            (None, True, count): self._compile(training=True, count=count)
        }
        """(form of the stages, training, micro-batches that are run) -> what this rank does"""
        self._orders: dict[tuple[bool, int], dict[P2PChannel, list[int]]] = {}

    def run(
        self,
        step: int,
        *,
        inputs: Sequence[Sequence[Any]],
        targets: Sequence[Any],
        training: bool = True,
        sizes: Sequence[int] | None = None,
    ) -> RankTrace | None:
        """One global batch. When training, gradients of all of it are added to the parameters' `.grad`.

        `inputs` and `targets` are the micro-batches' leaves and targets, empty where this rank needs none. Nothing
        of it is kept. `sizes` are the samples of the micro-batches that are run, the first ones of the schedule;
        None: all of it, as planned. Returns what was done when, unless the clock takes no times. Raises
        ActionError.
        """
        count = self._schedule.num_microbatches if sizes is None else len(sizes)
        key = (self._form, training, count)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._compile(training=training, count=count)
        for runner in self._runners.values():
            runner.begin(step, inputs, targets, sizes=sizes)
        self._clock.start()
        marks: list[tuple[_Step, Any, Any]] = []
        self.current = program[0].action if program else None
        try:
            self._begin(training, count)
            self._run(program, training, marks)
            if training and self._on_gradients is not None:
                self._on_gradients()
            for channel, outbox in self._outboxes.items():
                self.waiting = channel
                outbox.flush()
            self.waiting = None
        except Exception as error:
            raise self.failed(error) from error
        for runner in self._runners.values():
            runner.end()
        assert self.idle, "something of this global batch was kept"
        self.current = None
        return self._trace(marks) if self._clock.traces else None

    def use(self, runners: Mapping[int, StageRunner], form: int | None) -> None:
        """Run the stages by these from now on: another form of the same ones, by its key."""
        self._runners, self._form = dict(runners), form

    def failed(self, error: Exception) -> ActionError:
        """What to raise where the current action fails."""
        action = self.current or Action(self._schedule.stages_of(self.rank)[0], Kind.F, 0)
        stage = self._runners[action.stage].module
        return ActionError(self.rank, action, error, described(error, stage, microbatch=action.microbatch))

    def _run(self, program: list[_Step], training: bool, marks: list[tuple[_Step, Any, Any]]) -> None:
        begin, end, traces = self._clock.begin_action, self._clock.end_action, self._clock.traces
        forward, backward, input_gradient, weight_gradient = Kind.F, Kind.B, Kind.I, Kind.W
        on_action = self._on_action
        for step in program:
            self.current = step.action
            if on_action is not None:
                on_action(step.action)
            microbatch = step.microbatch
            if step.source is not None:
                self.waiting = step.source.channel
                values = step.source.take(microbatch)
                self.waiting = None
            elif step.handed is not None:
                values = self._handed.pop(step.handed)
            else:
                values = ()
            if step.released is not None:
                step.released.release(microbatch)
            kind = step.action.kind
            start = begin()
            if kind == forward:
                runner = step.runner
                made = (runner.forward if training else runner.evaluate)(microbatch, values)
            elif kind == backward:
                if step.reducer is not None:
                    step.reducer.start()
                made = step.runner.backward(microbatch, values)
            elif kind == input_gradient:
                made = step.runner.input_gradient(microbatch, values)
            elif kind == weight_gradient:
                if step.reducer is not None:
                    step.reducer.start()
                step.runner.weight_gradient(microbatch)
                made = ()
            else:
                step.runner.again(microbatch)
                made = ()
            ended = end()
            if traces:
                marks.append((step, start, ended))
            if step.target is not None:
                self.waiting = step.target.channel
                step.target.send(microbatch, made)
                self.waiting = None
            elif step.target_key is not None:
                self._handed[step.target_key] = made

    @property
    def idle(self) -> bool:
        """Whether nothing of a global batch is held: no saved activations, nothing coming and nothing under
        way."""
        return (
            not self._handed
            and all(runner.idle for runner in self._runners.values())
            and all(box.idle for box in self._boxes())
        )

    @property
    def peak_messages(self) -> int:
        """Most messages held at once at the ends of any channel of this rank."""
        return max((box.peak for box in self._boxes()), default=0)

    def _boxes(self) -> list[Inbox | Outbox]:
        return [*self._inboxes.values(), *self._outboxes.values()]

    def _begin(self, training: bool, count: int) -> None:
        for channel, inbox in self._inboxes.items():
            order = self._order(channel, training, count)
            inbox.begin(order, {item: self._messages(channel.boundary, item, channel.onward) for item in order})
        for channel, outbox in self._outboxes.items():
            outbox.begin(answered=training and channel.onward and self._carries(channel.reverse))

    def _carries(self, channel: P2PChannel) -> bool:
        """Whether anything crosses: no gradient comes back for values without gradients."""
        return channel in self._inboxes or channel in self._outboxes

    def _order(self, channel: P2PChannel, training: bool, count: int) -> list[int]:
        """In which order the sender makes what comes over a channel."""
        known = self._orders.setdefault((training, count), {})
        if channel not in known:
            maker = channel.boundary if channel.onward else channel.boundary + 1
            kinds = (Kind.F,) if channel.onward else (Kind.B, Kind.I) if training else ()
            taker = channel.boundary + 1 if channel.onward else channel.boundary
            known[channel] = [
                action.microbatch
                for action in self._actions(channel.from_rank, training)
                if action.microbatch is not None
                and action.microbatch < count
                and action.stage == maker
                and action.kind in kinds
                and self._schedule.rank_of(taker, action.microbatch) == self.rank
            ]
        return known[channel]

    def _actions(self, rank: int, training: bool) -> Iterable[Action]:
        """The actions of a rank, in order."""
        if training:
            return compute_lane(self._schedule, rank)
        if self._forwards is None:
            self._forwards = evaluation_order(self._schedule)
        return self._forwards[rank]

    def _compile(self, *, training: bool, count: int) -> list[_Step]:
        kinds = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R) if training else (Kind.F,)
        steps = []
        for action in self._actions(self.rank, training):
            if action.kind not in kinds or action.microbatch is None or action.microbatch >= count:
                continue
            step = _Step(
                action=action,
                label=str(action),
                runner=self._runners[action.stage],
                microbatch=action.microbatch,
            )
            if action.kind == Kind.F:
                self._connect(step, action.stage - 1, action.stage, onward=True)
            elif action.kind in (Kind.B, Kind.I):
                self._connect(step, action.stage, action.stage - 1, onward=False)
            steps.append(step)
        if training:
            last = {step.action.stage: step for step in steps if step.action.kind in (Kind.B, Kind.W)}
            for stage, step in last.items():
                step.reducer = self._reducers.get(stage)
        return steps

    def _connect(self, step: _Step, input_boundary: int, output_boundary: int, *, onward: bool) -> None:
        """Where the step's input comes from and its output goes to."""
        schedule, stage, microbatch = self._schedule, step.action.stage, step.microbatch
        before, after = (stage - 1, stage + 1) if onward else (stage + 1, stage - 1)
        count = schedule.num_stages
        if 0 <= before < count and self._messages(input_boundary, microbatch, onward):
            peer = schedule.rank_of(before, microbatch)
            maker = "F" if onward else "I" if (before, microbatch) in self._split else "B"
            step.source_label = f"{before}{maker}{microbatch}"
            if peer == self.rank:
                step.handed = (input_boundary, onward, microbatch)
            else:
                channel = P2PChannel(boundary=input_boundary, onward=onward, from_rank=peer, to_rank=self.rank)
                step.source = self._inboxes.setdefault(channel, Inbox(self._transport, channel))
                if not onward:
                    step.released = self._outboxes.get(channel.reverse)
        if 0 <= after < count and self._messages(output_boundary, microbatch, onward):
            peer = schedule.rank_of(after, microbatch)
            if peer == self.rank:
                step.target_key = (output_boundary, onward, microbatch)
            else:
                channel = P2PChannel(boundary=output_boundary, onward=onward, from_rank=self.rank, to_rank=peer)
                step.target = self._outboxes.setdefault(channel, Outbox(self._transport, channel))

    def _trace(self, marks: Sequence[tuple[_Step, Any, Any]]) -> RankTrace:
        times = iter(self._clock.times([item for _, start, end in marks for item in (start, end)]))
        events, sent, arrived = [], {}, {}
        for step, _, _ in marks:
            start, end = next(times), next(times)
            events.append((step.label, start, end))
            if step.source is not None:
                arrived[step.source_label] = start
            if step.target is not None:
                sent[step.label] = (step.target.channel.to_rank, end)
        return RankTrace(
            events=tuple(events),
            sent=sent,
            arrived=arrived,
            peak_in_flight={stage: runner.peak_in_flight for stage, runner in self._runners.items()},
        )
