"""PipeDream's cells of Table III: its own planner's stages, replicated or not, simulated in their steady state."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Literal

from bapipe.costs.segments import Chain
from bapipe.planner.candidate import Hardware, StageChoice
from bapipe.planner.evaluate import evaluate
from bapipe.planner.partition.baselines import pipedream
from bapipe.planner.pipelines import FAMILIES, build
from bapipe.schedule.actions import Schedule
from bapipe.simulator.lowering import Network, Route
from bapipe.simulator.simulate import simulate

__all__ = ["PipeDreamRun", "pipedream_run", "pipedream_stages"]

Counting = Literal["published", "released"]
_LONG = 40
"""micro-batches per accelerator after which the pipeline is taken to be in its steady state"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeDreamRun:
    """What PipeDream would do."""

    stages: tuple[StageChoice, ...]
    throughput: float
    """samples/s in the steady state"""

    @property
    def shape(self) -> str:
        """Replicas of each stage: 3-1."""
        return "-".join(str(len(stage.accelerators)) for stage in self.stages)


def pipedream_stages(
    chain: Chain, hardware: Hardware, *, straight: bool = False, counting: Counting = "released"
) -> tuple[StageChoice, ...]:
    """The stages that PipeDream's optimizer chooses for alike accelerators; it knows no memory."""
    rate = hardware.cluster.within.bandwidth
    plan = pipedream(
        chain.work[0].tolist(),
        transfer=(chain.boundary_forward[:-1] / rate).tolist(),
        synchronise=(chain.weight_bytes / rate).tolist(),
        machines=len(hardware.cluster),
        unreplicated=straight,
        counting=counting,
    )
    edges, first_of = [0, *plan.cuts, len(chain)], [0, *itertools.accumulate(plan.replicas)]
    return tuple(
        StageChoice(first=first, last=stop - 1, accelerators=tuple(range(at, at + count)))
        for first, stop, at, count in zip(edges[:-1], edges[1:], first_of[:-1], plan.replicas, strict=True)
    )


def pipedream_run(
    chain: Chain, hardware: Hardware, *, counting: Counting = "released", pairs: bool = False
) -> PipeDreamRun:
    """PipeDream with the chain's micro-batch.

    As in 1F1B-SNO each stage holds as many micro-batches as there are accelerators from it on, but nothing is
    flushed: the period is the slope between two long runs. A replicated stage reduces its gradients after every
    backward, which does not overlap (as the calibration has it), and all replicas of the narrower stage at a cut
    send or receive at β each; with `pairs`, every pair of replicas has a link of β of its own.
    """
    stages = pipedream_stages(chain, hardware, counting=counting)
    turn = math.lcm(*(len(stage.accelerators) for stage in stages))
    long = turn * math.ceil(_LONG * len(hardware.cluster) / turn)
    costs = evaluate(build(chain, stages, FAMILIES["1f1b-sno"], turn, hardware), hardware).costs
    # evaluate() books one all-reduce per global batch of all micro-batches; PipeDream has one per backward.
    backward = tuple(own + reduce for own, reduce in zip(costs.backward, costs.all_reduce, strict=True))
    costs = replace(costs, backward=backward, all_reduce=(0.0,) * len(stages))
    ends = []
    for microbatches in (long, 2 * long):
        schedule = build(chain, stages, FAMILIES["1f1b-sno"], microbatches, hardware).schedule
        network = _network(schedule, hardware.cluster.within.bandwidth, pairs=pairs)
        ends.append(simulate(schedule, costs, network).makespan)
    period = (ends[1] - ends[0]) / long
    return PipeDreamRun(stages=stages, throughput=chain.microbatch / period)


def _network(schedule: Schedule, rate: float, *, pairs: bool) -> Network:
    """Links between stages, both directions on one: a cut has as many as the narrower stage has replicas.

    With `pairs` it has one for every pair of replicas.
    """
    routes = {}
    for boundary, (ahead, behind) in enumerate(itertools.pairwise(schedule.placement)):
        for source in ahead:
            for target in behind:
                port = target if len(behind) <= len(ahead) else source
                link = (source, target) if pairs else (boundary, port)
                route = Route(seconds_per_unit=1 / rate, link=link)
                routes[source, target] = routes[target, source] = route
    return Network(routes=routes)
