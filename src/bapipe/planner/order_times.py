"""The times and bytes of a pipeline's stages that orders are made for."""

from __future__ import annotations

from collections.abc import Sequence

from bapipe.costs.segments import Chain
from bapipe.planner.candidate import Candidate, Hardware, StageChoice
from bapipe.planner.candidate_costs import stage_costs
from bapipe.planner.inflight_caps import inflight_bytes
from bapipe.planner.tuning import Tuning
from bapipe.schedule.list_schedule import StageTimes

__all__ = ["order_room", "order_times"]


def order_times(candidate: Candidate, hardware: Hardware, tuning: Tuning) -> list[StageTimes]:
    """Of every stage of a pipeline without replicas, with room for its activations and no cap on their number.

    The backward is whole where too little of it is the weights' gradients to be worth deferring; what stays on an
    accelerator is sent in no time.
    """
    chain, stages, cluster = candidate.chain, candidate.stages, hardware.cluster
    costs = stage_costs(candidate, hardware)

    def seconds(index: int, other: int, sent: float) -> float:
        here, there = (stages[at].accelerators[0] for at in (index, other))
        if here == there:
            return 0.0
        link = cluster.link(here, there)
        return sent / link.bandwidth + link.latency

    found, last = [], len(stages) - 1
    for index, stage in enumerate(stages):
        held = inflight_bytes(chain, stage, hardware)
        spare = tuning.order_spare_memory * cluster.type_of(stage.accelerators[0]).memory
        first, second = costs.input_gradient[index], costs.weight_gradient[index]
        if second < tuning.worth_deferring * (costs.forward[index] + first + second):
            first, second = costs.backward[index], 0.0
        found.append(
            StageTimes(
                forward=costs.forward[index],
                input_gradient=first,
                weight_gradient=second,
                send_forward=seconds(index, index + 1, costs.send_forward[index]) if index < last else 0.0,
                send_backward=seconds(index, index - 1, costs.send_backward[index - 1]) if index else 0.0,
                inflight=held.each,
                delayed=held.delayed,
                tail=costs.update[index],
                answered=index not in costs.unanswered,
                room=held.room - spare,
            )
        )
    return found


def order_room(
    chain: Chain,
    stages: Sequence[StageChoice],
    placement: Sequence[tuple[int, ...]],
    hardware: Hardware,
    tuning: Tuning,
) -> list[float]:
    """Bytes for the activations of all its stages, on the accelerator of each rank; of stages without replicas."""
    found = []
    for rank in range(1 + max(placed for (placed,) in placement)):
        own = [stage for stage, (placed,) in zip(stages, placement, strict=True) if placed == rank]
        memory = hardware.cluster.type_of(own[0].accelerators[0]).memory
        taken = sum(memory - inflight_bytes(chain, stage, hardware).room for stage in own)
        found.append(memory * (1 - tuning.order_spare_memory) - taken)
    return found
