"""A candidate timed and weighed against the memory of its accelerators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bapipe.costs.peak_memory import PeakBytes, rank_peaks
from bapipe.costs.stage_memory import StageBytes, stages_bytes
from bapipe.costs.stage_time import StageSeconds
from bapipe.planner.candidate import Candidate, Hardware, accelerators_of_ranks, as_run
from bapipe.planner.candidate_costs import run_costs, seconds_of
from bapipe.planner.fsdp_events import fsdp_peak
from bapipe.planner.gradient_rings import on_gpus
from bapipe.planner.plan_network import network_of
from bapipe.planner.sharded_costs import ddp_peak
from bapipe.planner.stand_ins import stand_ins
from bapipe.schedule.actions import Schedule
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate
from bapipe.simulator.timeline import Timeline

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """What a candidate takes."""

    candidate: Candidate
    schedule: Schedule
    """as run: with recomputation, all-reduce and optimizer step; of copies, those that stand for all"""
    ranks: tuple[int, ...]
    """the accelerator of each of its ranks, by index"""
    costs: Costs
    timeline: Timeline
    peaks: tuple[PeakBytes, ...]
    """on the accelerator of each stage that has least to spare, all its stages together"""
    rank_peaks: tuple[PeakBytes, ...]
    """on every rank of the schedule"""
    capacity: tuple[float, ...]
    stage_seconds: StageSeconds
    """what each stage takes per micro-batch"""
    stage_bytes: tuple[StageBytes, ...]
    """what each stage holds, by part"""
    crowding: Mapping[object, float] = field(default_factory=dict)
    """of each uplink, the transfers of all copies that one of the schedule's stands for"""

    @property
    def samples(self) -> int:
        return self.candidate.chain.microbatch * self.candidate.num_microbatches

    @property
    def memory(self) -> tuple[float, ...]:
        """Peak bytes of each stage's accelerators."""
        return tuple(peak.total for peak in self.peaks)

    @property
    def inflight(self) -> tuple[float, ...]:
        """In-flight micro-batches of the replica of each stage that has most. Linear in the actions."""
        schedule, timeline = self.schedule, self.timeline
        if schedule.dealing is not None:
            held = timeline.peak_in_flight_by_rank()
            return tuple(float(max(held[rank] for rank in ranks)) for ranks in schedule.placement)
        both = zip(timeline.peak_in_flight(), schedule.placement, strict=True)
        return tuple(float(-(-count // len(ranks))) for count, ranks in both)

    @property
    def overhead(self) -> float:
        """Seconds of a step beside its actions, where the profile knows them."""
        chain = self.candidate.chain
        return max(chain.profile.table(name).step_overhead or 0.0 for name in chain.types)

    @property
    def time(self) -> float:
        """Seconds of a step."""
        return self.timeline.time + self.overhead

    @property
    def throughput(self) -> float:
        return self.samples / self.time

    @property
    def short(self) -> tuple[int, float] | None:
        """The stage that lacks most memory and how many bytes, or None if all fits."""
        lacking = [need - have for need, have in zip(self.memory, self.capacity, strict=True)]
        stage = max(range(len(lacking)), key=lacking.__getitem__)
        return (stage, lacking[stage]) if lacking[stage] > 0 else None


def evaluate(candidate: Candidate, hardware: Hardware) -> Evaluation:
    """Simulate the candidate and weigh its memory. Linear in its actions, of copies in those of few."""
    schedule, copies = as_run(candidate), candidate.copies
    seconds = seconds_of(candidate.chain, candidate.stages, hardware.cluster)
    ranks = accelerators_of_ranks(candidate)
    crowding: Mapping[object, float] = {}
    if copies > 1:
        schedule, ranks, crowding = stand_ins(schedule, ranks, copies, hardware.cluster)
    simulated = schedule.num_ranks // candidate.schedule.num_ranks
    costs = run_costs(candidate, hardware, seconds, simulated=simulated)
    timeline = simulate(schedule, costs, network_of(hardware.cluster, ranks, schedule, crowding))
    needed = stages_bytes(candidate.chain, [(stage.first, stage.last) for stage in candidate.stages], schedule)
    copies_held, copies_stepping = hardware.stage_copies(candidate)
    peaks = rank_peaks(
        schedule,
        timeline,
        needed,
        copies=copies_held,
        update_copies=copies_stepping,
        phases_known=candidate.chain.phases_known,
    )
    if candidate.engine != "bapipe":
        peaks = [_engine_peak(candidate, hardware, needed[0])] * len(peaks)
    capacity, fullest = [], []
    for stage, placed in zip(candidate.stages, schedule.placement, strict=True):
        rooms = [hardware.cluster.type_of(index).memory for index in stage.accelerators[::copies]]
        rooms = [room for room in rooms for _ in range(simulated)]
        # The replica that lacks most, or has least to spare.
        at = max(range(len(placed)), key=lambda place: (peaks[placed[place]].total - rooms[place], -place))
        capacity.append(rooms[at])
        fullest.append(peaks[placed[at]])
    return Evaluation(
        candidate=candidate,
        schedule=schedule,
        ranks=ranks,
        costs=costs,
        timeline=timeline,
        peaks=tuple(fullest),
        rank_peaks=tuple(peaks),
        capacity=tuple(capacity),
        stage_seconds=seconds,
        stage_bytes=tuple(needed),
        crowding=crowding,
    )


def _engine_peak(candidate: Candidate, hardware: Hardware, needed: StageBytes) -> PeakBytes:
    """Of every rank, where torch's DDP or FSDP2 runs it."""
    memory = hardware.optimizer.memory
    if candidate.engine == "ddp":
        return PeakBytes(**ddp_peak(needed, state=memory.state, workspace=memory.workspace))
    members = candidate.stages[0].accelerators
    parts = fsdp_peak(
        candidate.chain,
        needed,
        replicas=len(members),
        state=memory.state,
        workspace=memory.workspace,
        microbatches=candidate.num_microbatches // len(members),
        gloo=not on_gpus(hardware.cluster, members),
    )
    return PeakBytes(**parts)
