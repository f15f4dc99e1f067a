"""Plans of every shape, made by the planner, for the report's tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from bapipe.analysis.predicted_measured import Comparison, compare
from bapipe.costs.profile import Profile
from bapipe.costs.resolve_model import load_profile
from bapipe.hardware.cluster_file import read_cluster, with_link_bandwidth
from bapipe.io.files import content_hash
from bapipe.planner import Exploration, Request, explore, make_plan
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan
from bapipe.records.run_record import EventRecord, RunEnvironment, RunRecord, StepRecord, TransferRecord
from bapipe.schedule.actions import Action, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to plan."""

    model: str
    cluster: str = "4xv100"
    bandwidth: float = 4e9
    dtype: str = "fp32"
    request: Request


SHAPES = {
    "straight": Case(model="gnmt-8", request=Request(global_batch=256, stages=4, schedule="1f1b-so")),
    "zero bubble": Case(
        model="gnmt-8", request=Request(global_batch=256, stages=4, schedule="zb-h1", optimizer="adam")
    ),
    "interleaved": Case(model="gnmt-8", request=Request(global_batch=256, schedule="interleaved")),
    "data parallel": Case(model="resnet50", request=Request(global_batch=256, schedule="data-parallel")),
    "hybrid": Case(model="vgg16", request=Request(global_batch=256, strategy="pipedream", optimizer="momentum")),
    "split layers": Case(
        model="vgg16",
        bandwidth=100e9,
        request=Request(global_batch=64, microbatch=1, stages=4, split_layers=True, schedule="1f1b-so"),
    ),
    "mixed types": Case(
        model="bert-base", cluster="2xa100+2xv100", request=Request(global_batch=128, stages=4, schedule="1f1b")
    ),
    "recompute": Case(model="bert-base", request=Request(global_batch=256, schedule="gpipe")),
    "two lanes": Case(
        model="vgg16",
        cluster="4xvcu118",
        dtype="fp16",
        request=Request(global_batch=16, microbatch=1, stages=4, schedule="fbp-as"),
    ),
}


@cache
def explored(shape: str) -> Exploration:
    case = SHAPES[shape]
    cluster = with_link_bandwidth(read_cluster(case.cluster), case.bandwidth)
    types = [cluster.types[name] for name in dict.fromkeys(item.type for item in cluster.accelerators)]
    profile = load_profile(case.model, types=types, precision=case.dtype, microbatches=[1, 2, 4, 8, 16])
    return explore(profile, cluster, case.request)


@cache
def planned(shape: str) -> tuple[Plan, Profile]:
    found = explored(shape)
    return make_plan(found), found.profile


def run_of(plan: Plan, *, slower: float = 1.25) -> RunRecord:
    """A run of what the simulator says of the plan, so many times slower."""
    timeline = plan_timeline(plan)
    names = [
        str(Action(int(stage), Kind(int(kind)), None if microbatch < 0 else int(microbatch)))
        for stage, kind, microbatch in zip(timeline.stages, timeline.kinds, timeline.microbatches, strict=True)
    ]
    sent = timeline.transfers
    return RunRecord(
        model=plan.model,
        plan_hash=content_hash(plan),
        environment=RunEnvironment(torch="2", python="3", hosts=("a",) * 4, backend="gloo", threads=1),
        world_size=timeline.num_ranks,
        steps=(StepRecord(step=0, loss=1.0, seconds=9.0), StepRecord(step=1, loss=0.5, seconds=2.0)),
        recorded_step=1,
        events=tuple(
            EventRecord(rank=int(rank), action=name, start=float(start) * slower, end=float(end) * slower)
            for rank, name, start, end in zip(timeline.ranks, names, timeline.start, timeline.end, strict=True)
        ),
        transfers=tuple(
            TransferRecord(
                action=names[int(source)],
                to_rank=int(rank),
                start=float(start) * slower,
                arrival=float(arrival) * slower,
            )
            for source, rank, start, arrival in zip(
                sent.source, sent.to_rank, sent.start, sent.arrival, strict=True
            )
        ),
        peak_in_flight=(1,) * len(plan.stages),
        peak_memory=(123_000_000,) * timeline.num_ranks,
    )


def compared(plan: Plan) -> Comparison:
    return compare(plan, run_of(plan))


HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>\"'&",
    "<!--<script>",
    "line\u2028separator\u202eoverride\x00nul\x1bescape",
    "emoji 🚀 naïve 漢字",
    "x" * 10_000,
)


def hostile(plan: Plan) -> Plan:
    """The plan with names, notes and reasons that try to get out of where they are shown."""
    names = [HOSTILE[place % len(HOSTILE)] for place in range(1000)]
    return replace(
        plan,
        model=replace(plan.model, name=HOSTILE[0] + HOSTILE[5]),
        stages=tuple(replace(stage, layers=tuple(names[: len(stage.layers)])) for stage in plan.stages),
        alternatives=tuple(
            replace(alternative, name=names[place], reason=names[place + 1])
            for place, alternative in enumerate(plan.alternatives)
        ),
        notes=HOSTILE,
    )
