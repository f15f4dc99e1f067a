"""RunRecord: what a run did: losses, times, and one global batch action by action; versioned as run.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bapipe.errors import BaPipeError
from bapipe.io.amounts import require_amounts
from bapipe.io.files import dump_json, read_versioned, write_text
from bapipe.models.layers import ModelRef
from bapipe.schedule.actions import Action, Kind
from bapipe.simulator.timeline import Timeline, Transfers

__all__ = [
    "RUN_SCHEMA",
    "CheckRecord",
    "Compared",
    "EventRecord",
    "MemorySource",
    "RunEnvironment",
    "RunRecord",
    "StepRecord",
    "TransferRecord",
    "read_run",
    "to_timeline",
    "write_run",
]

RUN_SCHEMA = "bapipe.run/1"
_MOST_RANKS = 10_000
MemorySource = Literal["allocated", "resident"]
"""allocated: bytes that torch held for tensors on the device, as a plan counts; resident: the whole process"""
Compared = Literal["whole", "outputs", "microbatches"]
"""what one process computed: the whole global batch at once; the loss of all samples, with outputs computed in
the run's micro-batches; or all in the run's micro-batches"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironment:
    """Where and with what the run was made."""

    torch: str
    """version"""
    python: str
    """version"""
    hosts: tuple[str, ...]
    """host name of each rank"""
    backend: str
    """of the process group: gloo…"""
    threads: int
    """torch threads of each rank"""
    devices: tuple[str, ...] = ()
    """what each rank computed on, such as `cpu` or `cuda`; empty: not known"""
    transport: str | None = None
    """what carried activations and their gradients between ranks; None: not known"""
    engine: str = "bapipe"
    """what ran the stages: bapipe, or torch for torch.distributed.pipelining's runtime"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One global batch and its optimizer step."""

    step: int
    """from 0"""
    loss: float | None
    """of the whole global batch, before the optimizer step; None: not a finite number"""
    seconds: float
    """from all ranks ready to all ranks done, optimizer step included"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """One action of the recorded step; waiting for its input is not part of it."""

    rank: int
    action: str
    """as in the plan: `0F0`; `0A` is the all-reduce of a stage's gradients, `0U` its optimizer step"""
    start: float
    """seconds after the step's first action began, the ranks' clocks aligned"""
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRecord:
    """An activation or its gradient that crossed to another rank."""

    action: str
    """the action that made it"""
    to_rank: int
    start: float
    """when the sender handed it over"""
    arrival: float
    """when the receiver had it in hand; where the receiver was busy, it may have arrived before"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRecord:
    """How far the run is from the same training in one process, over all its steps."""

    steps: int
    gradient_difference: float
    """largest absolute difference of a parameter's gradient, relative to that gradient's largest entry"""
    parameter: str
    """where that is"""
    loss_difference: float
    """largest relative difference of a step's loss"""
    tolerance: float
    """what the dtype allows"""
    compared: Compared | None = None
    """None: in the run's micro-batches, as PipeDream trains and as older versions did"""

    @property
    def passed(self) -> bool:
        return max(self.gradient_difference, self.loss_difference) <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Losses and times of every step, and one step in full."""

    schema: str = RUN_SCHEMA
    model: ModelRef
    plan_hash: str
    """`bapipe.io.files.content_hash` of the plan that ran"""
    environment: RunEnvironment
    world_size: int
    steps: tuple[StepRecord, ...]
    recorded_step: int
    """the step that `events` and `transfers` are of"""
    events: tuple[EventRecord, ...]
    """each rank's in the order in which it ran them; empty: the run was not traced"""
    transfers: tuple[TransferRecord, ...] | None = None
    """None: not known"""
    peak_in_flight: tuple[int, ...]
    """most in-flight micro-batches at each (virtual) stage, on one of its ranks, in any step"""
    peak_memory: tuple[int | None, ...]
    """most bytes of each rank, of the kind that `memory_source` says; None: not known"""
    memory_source: tuple[MemorySource, ...] = ()
    """per rank what `peak_memory` counts; empty: resident on all"""
    weight_versions: tuple[int, ...] = ()
    """most versions of its weights that each stage held at once (PipeDream); empty: one"""
    check: CheckRecord | None = None
    """None: not compared with training in one process"""

    @property
    def traced(self) -> StepRecord:
        """The step that is recorded in full."""
        return next(step for step in self.steps if step.step == self.recorded_step)

    def __post_init__(self) -> None:
        if not self.steps:
            raise BaPipeError("the run has no steps; run the plan again")
        if not 1 <= self.world_size <= _MOST_RANKS:
            raise BaPipeError(f"a run has 1 to {_MOST_RANKS} ranks, got {self.world_size}; run the plan again")
        if self.recorded_step not in {step.step for step in self.steps}:
            raise BaPipeError(f"the run records step {self.recorded_step}, which it has not run; run again")
        for event in self.events:
            if not 0 <= event.rank < self.world_size or not 0 <= event.start <= event.end:
                raise BaPipeError(
                    f"event {event.action} on rank {event.rank} from {event.start:g} to {event.end:g} s "
                    f"cannot be of {self.world_size} ranks; run the plan again"
                )
        for transfer in self.transfers or ():
            if not 0 <= transfer.to_rank < self.world_size:
                raise BaPipeError(
                    f"a transfer of {transfer.action[:40]} goes to rank {transfer.to_rank}, and there are ranks "
                    f"0 to {self.world_size - 1}; run the plan again"
                )
        for name, values in (
            ("peak_memory", self.peak_memory),
            ("memory_source", self.memory_source or self.peak_memory),
            ("environment.devices", self.environment.devices or self.peak_memory),
        ):
            if len(values) != self.world_size:
                raise BaPipeError(
                    f"{name} has {len(values)} entries for {self.world_size} ranks; run the plan again"
                )


def read_run(path: str | Path) -> RunRecord:
    """The one reader of run.json; one whose parts contradict each other is refused."""
    return read_versioned(RunRecord, path, schema=RUN_SCHEMA, check=_require_consistent)


def _require_consistent(record: RunRecord) -> None:
    """Amounts are not negative, and what was recorded are actions, and transfers of them, of one global batch."""
    todo = "run the plan again"
    require_amounts(record, where="the run", todo=todo)
    require_amounts(record.environment, where="environment", todo=todo)
    for step in record.steps:
        require_amounts(step, where=f"step {step.step}", todo=todo, signed=("loss",))
    if record.check is not None:
        require_amounts(record.check, where="check", todo=todo)
    actions = {event.action: Action.parse(event.action) for event in record.events}
    stages = 1 + max((action.stage for action in actions.values()), default=0)
    microbatches = 1 + max((action.microbatch or 0 for action in actions.values()), default=0)
    if stages * microbatches > len(actions) + _MOST_RANKS:
        raise BaPipeError(
            f"{stages} stages with {microbatches} micro-batches need at least {2 * stages * microbatches} events, "
            f"got {len(record.events)}; {todo}"
        )
    unknown = next((item.action for item in record.transfers or () if item.action not in actions), None)
    if unknown is not None and record.events:
        raise BaPipeError(f"there is a transfer of {unknown[:40]}, which is not among the events; {todo}")


def write_run(record: RunRecord, path: str | Path) -> None:
    """Write run.json; the same record gives the same bytes."""
    write_text(path, dump_json(record))


def to_timeline(record: RunRecord) -> Timeline:
    """The recorded step as a Timeline, to be measured and drawn like a simulated one.

    An all-reduce runs beside the compute of its rank, so it has a lane of its own, as in a simulation.
    """
    if not record.events:
        raise BaPipeError(
            "the run was not traced (--no-trace), so it has no timeline; run the plan again with --trace"
        )
    actions = [Action.parse(event.action) for event in record.events]
    index = {event.action: position for position, event in enumerate(record.events)}
    microbatches = [-1 if action.microbatch is None else action.microbatch for action in actions]
    start = np.array([event.start for event in record.events])
    end = np.array([event.end for event in record.events])
    return Timeline(
        num_ranks=record.world_size,
        num_stages=1 + max(action.stage for action in actions),
        num_microbatches=1 + max(microbatches),
        kinds=np.array([int(action.kind) for action in actions], dtype=np.int64),
        stages=np.array([action.stage for action in actions], dtype=np.int64),
        microbatches=np.array(microbatches, dtype=np.int64),
        ranks=np.array([event.rank for event in record.events], dtype=np.int64),
        lanes=np.array([int(action.kind == Kind.A) for action in actions], dtype=np.int64),
        start=start,
        end=end,
        work=end - start,
        transfers=_transfers(record.transfers or (), index),
    )


def _transfers(records: tuple[TransferRecord, ...], index: dict[str, int]) -> Transfers:
    unknown = [record.action for record in records if record.action not in index]
    if unknown:
        raise BaPipeError(f"the run has a transfer of {unknown[0]}, which is not among its events; run again")
    return Transfers(
        source=np.array([index[record.action] for record in records], dtype=np.int64),
        to_rank=np.array([record.to_rank for record in records], dtype=np.int64),
        start=np.array([record.start for record in records], dtype=np.float64),
        arrival=np.array([record.arrival for record in records], dtype=np.float64),
    )
