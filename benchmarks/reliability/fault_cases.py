"""The fault matrix: what happens where, under which schedule and transport, and what must come of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.hardware.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.models.layers import ModelRef
from bapipe.records.plan import Plan, PlanStage, Prediction
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import data_parallel, make_schedule, with_update
from bapipe.schedule.schedule_file import ScheduleFile

__all__ = ["EVERY", "SCHEDULES", "SLICES", "STEPS", "TIMEOUT", "Fault", "all_faults", "make_plan"]

STEPS, EVERY = 6, 2
"""of every run, and of its checkpoints"""
TIMEOUT = 6.0
"""seconds before a silent rank is given up"""
MICROBATCHES, SIZE = 4, 2
SLICES = 4
"""that a GPU is cut into"""
LAYERS = ("layer0", "layer1", "layer2", "layer3", "layer4", "head")
SCHEDULES: dict[str, int] = {
    "1f1b-so": 3,
    "1f1b-sno": 2,
    "gpipe": 3,
    "interleaved": 2,
    "zb-h1": 2,
    "data-parallel": 2,
    "hybrid": 3,
    "pipedream": 2,
}
"""name -> ranks; hybrid is 1f1b-so with two replicas of its first stage"""
_PLACES = ("F", "B", "loss", "optimizer", "save", "resume")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of one run."""

    schedule: str
    transport: str
    how: str
    """kill, stop, slow, raise, kill launcher, terminate launcher, fill disk, read-only disk"""
    place: str
    """build, F, B, loss, optimizer, save or resume"""
    ranks: tuple[int, ...]
    """that it happens on, at once"""
    step: int = 3
    """at the earliest"""
    seconds: float = 2.0
    """of a slow one"""
    restarts: bool = False
    """whether the launcher starts all ranks again; else the run is resumed by a second command"""

    @property
    def name(self) -> str:
        where = "+".join(map(str, self.ranks))
        how = self.how.replace(" ", "-")
        again = "restarts" if self.restarts else "resume"
        return f"{self.schedule}-{self.transport}-{how}-{self.place}-rank{where}-{again}"

    @property
    def saves(self) -> bool:
        """Whether the run is saved; PipeDream's weights are not."""
        return self.schedule != "pipedream"

    @property
    def on_disk(self) -> bool:
        return self.how in ("fill disk", "read-only disk")

    @property
    def is_harmless(self) -> bool:
        """Whether the run must get to its end: what is slow, and a file of a checkpoint that cannot be written."""
        return self.how == "slow" or (self.how, self.place) == ("raise", "save")

    @property
    def bound(self) -> float:
        """Seconds from the fault to the end of the command, or, with restarts, to that of its first attempt.

        For a rank that is stopped that is the timeout, and for all what it takes to end processes on a busy
        machine.
        """
        return (2 * TIMEOUT if self.how == "stop" else 0.0) + 20.0


def schedule_of(name: str) -> Schedule:
    """The order of that name, for its ranks."""
    ranks = SCHEDULES[name]
    if name == "data-parallel":
        return data_parallel(ranks, MICROBATCHES // ranks)
    if name == "hybrid":
        return with_update(make_schedule("1f1b-so", 2, MICROBATCHES, replicas=(2, 1)))
    if name == "pipedream":
        return make_schedule(name, ranks, MICROBATCHES)
    return with_update(make_schedule(name, ranks, MICROBATCHES))


def make_plan(name: str, *, device: str, sliced: bool = False) -> Plan:
    """A plan of the faulty model under that schedule, cut evenly; nothing is predicted. `sliced`: for one of
    `SLICES` equal slices of a GPU per rank."""
    schedule = schedule_of(name)
    stages = schedule.num_stages
    cuts = [len(LAYERS) * stage // stages for stage in range(stages + 1)]
    kind = AcceleratorType(
        name=f"gpu-{100 // SLICES}pct" if sliced else "any",
        kind="gpu" if device == "cuda" else "cpu",
        flops={"fp32": 1e10},
        memory=8e9,
        memory_bandwidth=1e10,
        execution="synchronous",
    )
    return Plan(
        kind="data-parallel" if name == "data-parallel" else "hybrid" if name == "hybrid" else "pipeline",
        model=ModelRef(name="faulty", ref="faulty_model:build"),
        profile_hash="none",
        cluster=Cluster(
            name=f"{schedule.num_ranks} ranks",
            accelerators=tuple(
                Accelerator(name=f"localhost/{rank}", type=kind.name, node="localhost")
                for rank in range(schedule.num_ranks)
            ),
            types={kind.name: kind},
            within=Link(bandwidth=1e9, latency=50e-6),
        ),
        dtype="fp64",
        optimizer="adam",
        strategy="by hand",
        microbatch_size=SIZE,
        microbatches=MICROBATCHES,
        global_batch=MICROBATCHES * SIZE,
        stages=tuple(
            PlanStage(
                accelerators=tuple(f"localhost/{rank}" for rank in schedule.placement[index]),
                first_layer=first,
                last_layer=after - 1,
                layers=LAYERS[first:after],
                forward=1.0,
                backward=2.0,
                weight_gradient=1.0,
                send_forward_bytes=0.0,
                send_backward_bytes=0.0,
                weight_bytes=0.0,
                memory_bytes=0.0,
                memory_capacity=kind.memory,
                in_flight=1.0,
            )
            for index, (first, after) in enumerate(itertools.pairwise(cuts))
        ),
        schedule=ScheduleFile.of(schedule),
        prediction=Prediction(
            time=1.0,
            throughput=1.0,
            bubble=0.0,
            exposed_communication=0.0,
            lower_bound=1.0,
            gap=0.0,
            source="none",
        ),
    )


def _ranks_at(schedule: str, place: str) -> list[int]:
    """Ranks that come by such a place."""
    order = schedule_of(schedule)
    if place == "loss":
        return list(order.placement[-1])
    return list(range(order.num_ranks))


def all_faults(transports: Sequence[str], *, seed: int) -> list[Fault]:
    """The matrix; `seed` settles on which rank each happens, whether the launcher restarts it, and their order."""
    chance = random.Random(seed)
    found: list[Fault] = []
    for transport, schedule in itertools.product(transports, SCHEDULES):
        saved = schedule != "pipedream"
        places = _PLACES if saved else ("F", "B", "loss", "optimizer")
        pairs = [(how, place) for how in ("kill", "raise", "stop", "slow") for place in places]
        for how, place in pairs:
            if (how, place) == ("raise", "resume"):
                continue  # a file that cannot be read is damage to a checkpoint, which has a campaign of its own
            rank = chance.choice(_ranks_at(schedule, place))
            again = how != "slow" and (how, place) != ("raise", "save") and chance.random() < 0.5
            found.append(
                Fault(schedule=schedule, transport=transport, how=how, place=place, ranks=(rank,), restarts=again)
            )
        for how in ("kill launcher", "terminate launcher"):
            rank = chance.choice(_ranks_at(schedule, "F"))
            found.append(Fault(schedule=schedule, transport=transport, how=how, place="F", ranks=(rank,)))
        both = tuple(sorted(chance.sample(_ranks_at(schedule, "F"), 2)))
        other = (chance.choice(_ranks_at(schedule, "F")),)
        for how, place, ranks, again in (
            ("kill", "optimizer", both, True),
            ("kill", "build", other, False),
            ("stop", "F", both, False),
        ):
            found.append(
                Fault(schedule=schedule, transport=transport, how=how, place=place, ranks=ranks, restarts=again)
            )
        if saved:
            found += [
                Fault(schedule=schedule, transport=transport, how=how, place="F", ranks=(0,))
                for how in ("fill disk", "read-only disk")
            ]
    chance.shuffle(found)
    return found
