"""A candidate: stages on accelerators and a schedule, and the hardware that it is compared on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from bapipe.costs.planned_optimizer import PlannedOptimizer
from bapipe.costs.segments import Chain
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster
from bapipe.planner.partition.paper.step_record import Step
from bapipe.planner.sharded_costs import sharded_copies
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import with_recompute, with_update

__all__ = [
    "Candidate",
    "Hardware",
    "StageChoice",
    "accelerators_of_ranks",
    "as_run",
    "is_data_parallel",
    "layers_recomputing",
    "stage_shape",
    "takes_moves",
    "unreplicated",
]


_LISTED = ("zb", "zb-v", "v-half", "v-min", "interleaved")
"""schedules that are any order which holds no more than they; the others are one order each"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """Units [first, last] on some accelerators, one per replica."""

    first: int
    last: int
    accelerators: tuple[int, ...]
    recompute: bool = False


def unreplicated(stages: Sequence[StageChoice]) -> bool:
    """Whether every stage has one accelerator: pipeline parallelism without data parallelism."""
    return all(len(stage.accelerators) == 1 for stage in stages)


def is_data_parallel(stages: Sequence[StageChoice]) -> bool:
    """Whether several accelerators each hold the whole model."""
    return len(stages) == 1 and len(stages[0].accelerators) > 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """One way to train: what the planner compares."""

    label: str
    """how a person calls it, such as "1f1b-so, 4 stages" """
    chain: Chain
    stages: tuple[StageChoice, ...]
    schedule: Schedule
    """without R, A and U; `evaluate` adds them"""
    steps: tuple[Step, ...] = ()
    """how its partition came about, where that was recorded"""
    copies: int = 1
    """replicas of all of it, with micro-batches by turns: the schedule is that of one, and `stages` has the
    accelerators of all, in the order of `replicated_pipelines`"""
    zero: bool = False
    """whether the replicas of a stage share its optimizer state (ZeRO-1)"""
    engine: Literal["bapipe", "ddp", "fsdp"] = "bapipe"
    """who runs it; torch's DDP and FSDP2 have one stage on all accelerators"""

    @property
    def num_microbatches(self) -> int:
        """Of the global batch, all replicas together."""
        return self.copies * self.schedule.num_microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The cluster and the rules that turn a profile into memory and time."""

    cluster: Cluster
    optimizer: PlannedOptimizer = field(default_factory=PlannedOptimizer)
    overlap_all_reduce: bool = True
    """data parallelism reduces a bucket as soon as its gradients are there, as DDP does"""

    def static_copies(self) -> float:
        """Weights, gradients and optimizer state, in copies of the weights that are trained."""
        return 2 + self.optimizer.memory.state

    def stage_copies(self, candidate: Candidate) -> tuple[list[float], list[float]]:
        """Of each stage `static_copies` and `update_copies`, with what its replicas share."""
        whole, memory = (self.static_copies(), self.update_copies()), self.optimizer.memory
        counts = [len(stage.accelerators) if candidate.zero else 1 for stage in candidate.stages]
        both = [sharded_copies(memory.state, memory.workspace, count) if count > 1 else whole for count in counts]
        return [always for always, _ in both], [stepping for _, stepping in both]

    def update_copies(self) -> float:
        """Those and what the optimizer's step makes besides."""
        return self.static_copies() + self.optimizer.memory.workspace


def layers_recomputing(chain: Chain) -> str:
    """What a label says of the layers of a chain that recompute, if any."""
    count = sum(last - first + 1 for first, last in chain.recompute)
    return f", {count} layer{'s' * (count > 1)} recomputing" if count else ""


def stage_shape(counts: Sequence[int]) -> str:
    """What a label says of the stages of a pipeline, given how many accelerators each has."""
    if max(counts) > 1:
        return "stages " + "-".join(map(str, counts))
    return f"{len(counts)} stages" if len(counts) > 1 else "one accelerator"


def as_run(candidate: Candidate) -> Schedule:
    """The candidate's schedule with recomputation, all-reduce and optimizer step; of copies, that of one."""
    schedule = candidate.schedule
    chosen = [index for index, stage in enumerate(candidate.stages) if stage.recompute]
    if chosen:
        schedule = with_recompute(schedule, chosen)
    return with_update(schedule, replicas=candidate.copies) if schedule.flushes else schedule


def takes_moves(candidate: Candidate, *, most: int) -> bool:
    """Whether its order is one of many that its schedule's name allows, so that actions may change places.

    And it has no replicas, recomputes nothing and does not have more than `most` forwards.
    """
    schedule, stages = candidate.schedule, candidate.stages
    plain = candidate.copies == 1 and candidate.engine == "bapipe" and schedule.num_ranks > 1
    return (
        schedule.name in _LISTED
        and plain
        and len(stages) * schedule.num_microbatches <= most
        and unreplicated(stages)
        and not any(stage.recompute for stage in stages)
    )


def accelerators_of_ranks(candidate: Candidate) -> tuple[int, ...]:
    """The accelerator of each rank, by index, all copies together."""
    ranks = tuple(dict.fromkeys(index for stage in candidate.stages for index in stage.accelerators))
    wanted = candidate.copies * candidate.schedule.num_ranks
    if len(ranks) != wanted:
        raise BaPipeError(f"{candidate.label}: {len(ranks)} accelerators for {wanted} ranks")
    return ranks
