"""Six cases whose answers are worked out by hand, as docs/guide/sharding.md has them; the planner gives the same.

Eight layers of 1 GB on four accelerators, each 0.1 s of forward and 0.2 s of backward a sample, with 0.1 GB of
saved activations and 10 MB between layers; fused Adam, so that plain data parallelism keeps 4 copies of weights;
micro-batches of one sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from bapipe.hardware.cluster import Cluster, CollectiveRates
from bapipe.planner import Request, explore, make_plan
from bapipe.records.plan import Plan
from made_profiles import made_cluster, made_profile

LAYERS, RANKS, FORWARD, BACKWARD, BUCKET = 8, 4, 0.1, 0.2, 25e6
WORK = LAYERS * (FORWARD + BACKWARD)
FUSED = "adam(fused=true)"


def ring(size: float, bandwidth: float) -> float:
    """An all-reduce: 2(r−1)/r of the bytes."""
    return 2 * (RANKS - 1) / RANKS * size / bandwidth


def data_parallel(batch: int, layer: float, bandwidth: float) -> float:
    """What the last backward does not hide of the all-reduce, but at least its last bucket."""
    hidden = ring(LAYERS * layer, bandwidth) - LAYERS * BACKWARD
    return batch / RANKS * WORK + max(ring(BUCKET, bandwidth), hidden)


def zero_1(batch: int, layer: float, bandwidth: float, update: float = 0.0) -> float:
    """Half of the all-reduce beside the backward, a quarter of the step, and an all-gather of all weights."""
    scattered = max(ring(BUCKET, bandwidth), ring(LAYERS * layer, bandwidth) - 2 * LAYERS * BACKWARD) / 2
    return batch / RANKS * WORK + scattered + LAYERS * update / RANKS + ring(LAYERS * layer, bandwidth) / 2


def fsdp(batch: int, layer: float, bandwidth: float) -> float:
    """Where links are fast: the first gather of forward and backward and the last scatter are seen."""
    return batch / RANKS * (WORK + 3 * ring(layer, bandwidth) / 2)


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    bandwidth: float
    memory: float
    answer: str
    """data-parallel, zero, fsdp or pipeline"""
    time: float | None
    """by hand; None: a pipeline, whose bubble the simulator knows"""
    batch: int = 16
    layer: float = 1e9
    """bytes of weights"""
    update: float = 0.0
    """seconds of a layer's optimizer step"""
    rates: CollectiveRates = field(default_factory=CollectiveRates)


CASES = [
    Case(name="fast links, much memory", bandwidth=100e9, memory=80e9, answer="data-parallel",
         time=data_parallel(16, 1e9, 100e9)),
    Case(name="fast links, 24 GB", bandwidth=100e9, memory=24e9, answer="zero", time=zero_1(16, 1e9, 100e9)),
    Case(name="fast links, 16 GB", bandwidth=100e9, memory=16e9, answer="fsdp", time=fsdp(16, 1e9, 100e9)),
    Case(name="slow links, 16 GB", bandwidth=1e9, memory=16e9, answer="pipeline", time=None),
    Case(name="slow links, light weights, large batch", bandwidth=1e9, memory=80e9, answer="data-parallel",
         time=data_parallel(256, 1e8, 1e9), batch=256, layer=1e8),
    Case(name="fast links, slow optimizer step", bandwidth=100e9, memory=80e9, answer="zero",
         time=zero_1(16, 1e9, 100e9, 0.5), update=0.5),
]  # fmt: skip


def planned(case: Case, **request: str) -> Plan:
    profile = made_profile(
        {"x": [FORWARD + BACKWARD] * LAYERS},
        weights=[case.layer] * LAYERS,
        saved_activations=[1e8] * LAYERS,
        boundary=[1e7] * LAYERS,
        sizes=(1,),
    )
    table = replace(profile.accelerators["x"], update=(case.update,) * LAYERS)
    profile = replace(profile, accelerators={"x": table})
    asked = Request(global_batch=case.batch, optimizer=FUSED, **request)  # type: ignore[arg-type]
    return make_plan(explore(profile, cluster(case), asked))


def cluster(case: Case) -> Cluster:
    made = made_cluster({"x": RANKS}, bandwidth=case.bandwidth, memory=case.memory)
    known = case.bandwidth if case.rates.known else None
    return replace(made, collective_bandwidth=known, collective_rates=case.rates)


def answer(plan: Plan) -> str:
    if plan.engine != "bapipe":
        return plan.engine
    if plan.zero_stage:
        return "zero" if plan.kind == "data-parallel" else f"{plan.kind} with ZeRO-1"
    return plan.kind


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_planner_gives_the_answer_that_was_worked_out(case: Case) -> None:
    plan = planned(case)
    assert answer(plan) == case.answer, [(item.name, item.time) for item in plan.alternatives[:6]]
    if case.time is not None:
        assert plan.prediction.time == pytest.approx(case.time, rel=1e-4)
    for stage in plan.stages:
        assert stage.memory_bytes <= case.memory


@pytest.mark.parametrize(
    ("rates", "data_parallel_by", "zero_by", "fsdp_by"),
    [
        (CollectiveRates(buckets=4e9), 4.0, (4.0, 1.0), (1.0, 4.0)),
        (CollectiveRates(buckets=4e9, gather=2e9, scatter=8e9), 4.0, (8.0, 2.0), (2.0, 8.0)),
        (CollectiveRates(gather=2e9), 1.0, (1.0, 2.0), (2.0, 1.0)),
    ],
)
def test_plans_are_priced_by_the_rates_of_the_collectives_that_they_use(
    rates: CollectiveRates,
    data_parallel_by: float,
    zero_by: tuple[float, float],
    fsdp_by: tuple[float, float],
) -> None:
    """Links of 1 GB/s, where an all-reduce of all weights takes 12 s, and its halves 6.

    FSDP2 gathers all weights twice for each of four micro-batches and scatters all gradients. On links so slow all
    of that is seen, and some of the compute.
    """
    case = Case(name="", bandwidth=1e9, memory=80e9, answer="", time=None, rates=rates)
    whole, forward, backward = ring(8e9, 1e9), LAYERS * FORWARD, LAYERS * BACKWARD
    work = case.batch / RANKS * (forward + backward)
    found = planned(case, strategy="dp", zero_stage="0").prediction.time
    assert found == pytest.approx(work + whole / data_parallel_by - backward)
    assert planned(case, strategy="ddp").prediction.time == pytest.approx(found)
    scatter, gather = whole / 2 / zero_by[0], whole / 2 / zero_by[1]
    found = planned(case, strategy="dp", zero_stage="1").prediction.time
    seen = max(BUCKET / (LAYERS * case.layer) * scatter, scatter - backward)
    assert found == pytest.approx(work + seen + gather)
    gather, scatter = (whole / 2 / by for by in fsdp_by)
    found = planned(case, strategy="fsdp").prediction.time / (case.batch / RANKS)
    assert 2 * gather + scatter < found < 2 * gather + scatter + forward + backward


def test_memory_is_what_is_sharded() -> None:
    plain, shared, sharded = CASES[0], CASES[1], CASES[2]
    weights, saved = LAYERS * 1e9, LAYERS * 1e8
    # The profile has no phases: what a stage sends on counts as saved too.
    assert planned(plain).stages[0].memory_bytes == pytest.approx(4 * weights + saved, rel=0.01)
    assert planned(shared).stages[0].memory_bytes == pytest.approx((2 + 2 / RANKS) * weights + saved, rel=0.01)
    units = (2 + 2) * 1e9  # two whose weights are gathered, two whose gradients are summed
    assert planned(sharded).stages[0].memory_bytes == pytest.approx(4 * weights / RANKS + units + saved, rel=0.01)


def test_it_is_forced_and_forbidden() -> None:
    fast, small = CASES[0], CASES[1]
    assert answer(planned(fast, zero_stage="1")) == "zero"
    assert answer(planned(fast, strategy="fsdp")) == "fsdp"
    assert answer(planned(fast, strategy="ddp")) == "ddp"
    without = planned(small, zero_stage="0")
    assert without.zero_stage == 0
    assert not any("ZeRO-1" in item.name for item in without.alternatives)
    listed = [item.name for item in planned(fast).alternatives]
    assert any("ZeRO-1" in name for name in listed)
    assert any(name.startswith("FSDP2 of torch") for name in listed)
    assert any(name.startswith("DDP of torch") for name in listed)


@pytest.mark.parametrize("strategy", ["dp", "exact"])
def test_what_is_asked_for_is_planned_where_times_are_not_exact(strategy: str) -> None:
    """A plan without ZeRO-1 would be as fast or faster, and lies within error of the best."""
    profile = made_profile({"cpu-core": [0.3] * 4}, weights=[1e6] * 4, sizes=(1,))
    asked = Request(
        global_batch=8, microbatch=1, strategy=strategy, zero_stage="1", optimizer="adam", layer_error=0.1
    )
    found = explore(profile, made_cluster({"cpu-core": 2}), asked)
    assert found.outlook is not None
    assert all(own.candidate.zero for own in found.outlook.evaluations)
    assert make_plan(found).zero_stage == 1
