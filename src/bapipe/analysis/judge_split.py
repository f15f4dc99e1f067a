"""How far a split that somebody made by hand is from the best plan, and where it loses."""

from __future__ import annotations

from dataclasses import dataclass

from bapipe.analysis.hand_split import HandSplit
from bapipe.costs.profile import Profile
from bapipe.costs.segments import make_chain
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster
from bapipe.planner import Exploration, Request, explore
from bapipe.planner.candidate import Candidate, StageChoice
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.request import microbatch_sizes
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import make_schedule
from bapipe.schedule.validate import require_valid
from bapipe.simulator.timeline import Timeline

__all__ = ["Judged", "Judgement", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a way to train takes."""

    name: str
    time: float
    """seconds of a step"""
    throughput: float
    """samples per second"""
    bubble: float
    memory: float
    """bytes on the fullest accelerator"""
    short: float
    """bytes that are lacking on the accelerator that lacks most; 0: all fits"""
    microbatch: int
    microbatches: int
    layers: tuple[int, ...]
    """of each stage"""
    seconds: tuple[float, ...]
    """that each stage computes in a step"""
    timeline: Timeline

    @property
    def bottleneck(self) -> int:
        """The stage that computes longest."""
        return max(range(len(self.seconds)), key=self.seconds.__getitem__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A split by hand beside the best plan."""

    given: Judged
    best: Judged
    bottleneck_layers: tuple[str, str]
    """first and last layer of the given split's slowest stage"""

    @property
    def longer(self) -> float:
        """By what share of the best step the given one is longer."""
        return self.given.time / self.best.time - 1


def judge(
    profile: Profile, cluster: Cluster, split: HandSplit, *, request: Request, schedule: str | None = None
) -> Judgement:
    """Simulate the split and plan the same request; `schedule` is the split's, by default (interleaved) 1F1B.

    Without a micro-batch size in the request each has its own best. Accelerators beyond the pipeline's are
    replicas of it, as in other engines, where that goes up; else they are idle.
    """
    found = explore(profile, cluster, request)
    given = min(
        (evaluate(candidate, found.hardware) for candidate in _candidates(found, split, schedule)),
        key=lambda item: (item.short is not None, item.time),
    )
    shown = _judged(given)
    slowest = given.candidate.stages[shown.bottleneck]
    return Judgement(
        given=shown,
        best=_judged(found.best),
        bottleneck_layers=(profile.layers[slowest.first].name, profile.layers[slowest.last].name),
    )


def _candidates(found: Exploration, split: HandSplit, schedule: str | None) -> list[Candidate]:
    """The split at every micro-batch size that fits the global batch and its order."""
    profile, cluster = found.profile, found.hardware.cluster
    types = tuple(dict.fromkeys(item.type for item in cluster.accelerators))
    order, candidates = split.order, []
    for size in microbatch_sizes(profile, cluster, found.request, found.global_batch):
        microbatches = found.global_batch // size
        if order is not None and microbatches != order.num_microbatches:
            continue
        made, stages = _stages(split, len(cluster), microbatches, schedule, len(profile.layers))
        chain = make_chain(profile, types, size)
        candidates.append(Candidate(label=split.name, chain=chain, stages=stages, schedule=made))
    if not candidates:
        count = order.num_microbatches if order is not None else 0
        raise BaPipeError(
            f"the order has {count} micro-batches, which no profiled size makes of a global batch of "
            f"{found.global_batch}; give --global-batch {count} times a size that is profiled"
        )
    return candidates


def _stages(
    split: HandSplit, accelerators: int, microbatches: int, schedule: str | None, layers: int
) -> tuple[Schedule, tuple[StageChoice, ...]]:
    count = split.stages
    ranks = split.order.num_ranks if split.order is not None else split.ranks or min(count, accelerators)
    if ranks > accelerators or count % ranks:
        raise BaPipeError(
            f"{count} stages cannot be dealt to {ranks} ranks on {accelerators} accelerators; change the split or "
            "--cluster"
        )
    edges = [0, *split.firsts, layers]
    if split.order is not None:
        require_valid(split.order)
        members = list(split.order.placement)
        made = split.order
    elif count > ranks:
        made = make_schedule("interleaved", ranks, microbatches, virtual=count // ranks)
        members = [(stage % ranks,) for stage in range(count)]
    else:
        replicas = (
            accelerators // ranks if accelerators % ranks == 0 and microbatches >= accelerators // ranks else 1
        )
        made = make_schedule(schedule or "1f1b-sno", count, microbatches, replicas=(replicas,) * count)
        members = [tuple(range(stage * replicas, (stage + 1) * replicas)) for stage in range(count)]
    stages = tuple(
        StageChoice(first=first, last=end - 1, accelerators=own)
        for first, end, own in zip(edges[:-1], edges[1:], members, strict=True)
    )
    return made, stages


def _judged(found: Evaluation) -> Judged:
    chain = found.candidate.chain
    microbatches = found.candidate.num_microbatches
    short = found.short
    work = zip(found.costs.forward, found.costs.backward, found.candidate.stages, strict=True)
    return Judged(
        name=found.candidate.label,
        time=found.time,
        throughput=found.throughput,
        bubble=found.timeline.bubble,
        memory=max(found.memory),
        short=0.0 if short is None else short[1],
        microbatch=chain.microbatch,
        microbatches=microbatches,
        layers=tuple(stage.last - stage.first + 1 for stage in found.candidate.stages),
        seconds=tuple(
            (forward + backward) * microbatches / len(stage.accelerators) for forward, backward, stage in work
        ),
        timeline=found.timeline,
    )
