"""The timeline of a plan, from what stands in it."""

from __future__ import annotations

from bapipe.planner.plan_network import network_of
from bapipe.records.plan import Plan
from bapipe.simulator.action_costs import Costs, ReplicaCosts
from bapipe.simulator.simulate import simulate
from bapipe.simulator.timeline import Timeline

__all__ = ["plan_timeline"]


def plan_timeline(plan: Plan) -> Timeline:
    """The predicted timeline of a plan, from what stands in it."""
    schedule = plan.schedule.to_schedule()
    names = [accelerator.name for accelerator in plan.cluster.accelerators]
    ranks = tuple(names.index(name) for name in plan.ranks)
    stages = plan.stages
    weight = [min(stage.weight_gradient, stage.backward) for stage in stages]
    costs = Costs(
        forward=tuple(stage.forward for stage in stages),
        backward=tuple(stage.backward for stage in stages),
        send_forward=tuple(stage.send_forward_bytes for stage in stages[:-1]),
        send_backward=tuple(stage.send_backward_bytes for stage in stages[1:]),
        input_gradient=tuple(stage.backward - part for stage, part in zip(stages, weight, strict=True)),
        weight_gradient=tuple(part + stage.parting for stage, part in zip(stages, weight, strict=True)),
        recompute=tuple(stage.forward for stage in stages),
        all_reduce=tuple(stage.all_reduce for stage in stages),
        update=tuple(stage.update for stage in stages),
        replicas=_planned_replicas(plan),
        unanswered=tuple(index for index, stage in enumerate(stages[1:]) if not stage.sends_gradient),
    )
    return simulate(schedule, costs, network_of(plan.cluster, ranks, schedule))


def _planned_replicas(plan: Plan) -> tuple[tuple[ReplicaCosts, ...], ...] | None:
    """What the replicas of a plan's stages take where they are not alike."""
    if all(stage.replicas is None for stage in plan.stages):
        return None
    return tuple(
        tuple(
            ReplicaCosts(
                forward=own.forward,
                backward=own.backward,
                input_gradient=own.backward - min(own.weight_gradient, own.backward),
                weight_gradient=min(own.weight_gradient, own.backward) + own.parting,
                recompute=own.forward,
                update=own.update,
            )
            for own in stage.replicas or ()
        )
        for stage in plan.stages
    )
