"""Runs as the runtime would record them, made from simulated timelines, for tests."""

from __future__ import annotations

from dataclasses import replace

from bapipe.io.files import content_hash
from bapipe.planner.plan_network import network_of
from bapipe.records.plan import Plan
from bapipe.records.run_record import EventRecord, RunEnvironment, RunRecord, StepRecord, TransferRecord
from bapipe.schedule.actions import Action, Kind
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate
from bapipe.simulator.timeline import Timeline


def simulated(plan: Plan, costs: Costs) -> Timeline:
    """The plan's order under other costs, over its own links."""
    schedule = plan.schedule.to_schedule()
    names = [accelerator.name for accelerator in plan.cluster.accelerators]
    ranks = tuple(names.index(name) for name in plan.ranks)
    return simulate(schedule, costs, network_of(plan.cluster, ranks, schedule))


def stretched(timeline: Timeline, slower: float) -> Timeline:
    """The same with every time so many times later."""
    transfers = timeline.transfers
    return replace(
        timeline,
        start=timeline.start * slower,
        end=timeline.end * slower,
        transfers=replace(transfers, start=transfers.start * slower, arrival=transfers.arrival * slower),
    )


def action_at(timeline: Timeline, index: int) -> str:
    microbatch = int(timeline.microbatches[index])
    kind = Kind(int(timeline.kinds[index]))
    return str(Action(int(timeline.stages[index]), kind, None if microbatch < 0 else microbatch))


def made_run(plan: Plan, timeline: Timeline, *, outside: float = 0.0, **changes: object) -> RunRecord:
    """The timeline as the second of three steps, which takes `outside` seconds more than its actions."""
    ranks = timeline.num_ranks
    transfers = timeline.transfers
    seconds = timeline.makespan + outside
    record = RunRecord(
        model=plan.model,
        plan_hash=content_hash(plan),
        environment=RunEnvironment(torch="2", python="3", hosts=("a",) * ranks, backend="gloo", threads=1),
        world_size=ranks,
        steps=tuple(StepRecord(step=i, loss=1.0, seconds=seconds * factor) for i, factor in enumerate((5, 1, 1))),
        recorded_step=1,
        events=tuple(
            EventRecord(
                rank=int(timeline.ranks[index]),
                action=action_at(timeline, index),
                start=float(timeline.start[index]),
                end=float(timeline.end[index]),
            )
            for index in range(len(timeline.kinds))
        ),
        transfers=tuple(
            TransferRecord(
                action=action_at(timeline, int(source)),
                to_rank=int(to_rank),
                start=float(start),
                arrival=float(end),
            )
            for source, to_rank, start, end in zip(
                transfers.source, transfers.to_rank, transfers.start, transfers.arrival, strict=True
            )
        ),
        peak_in_flight=tuple(timeline.peak_in_flight()),
        peak_memory=(None,) * ranks,
    )
    return replace(record, **changes)  # type: ignore[arg-type]
