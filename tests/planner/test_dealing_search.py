"""Micro-batches by the speed of replicas: planned, written, simulated again, and as fast as the best of all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bapipe.costs.segments import make_chain
from bapipe.errors import BaPipeError, FileFormatError
from bapipe.io.files import dump_json
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.candidate import Candidate, Hardware, StageChoice
from bapipe.planner.evaluate import evaluate
from bapipe.planner.inputs import cluster_with, profile_for
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.planner.tuning import DEFAULT_TUNING
from bapipe.records.plan import Plan, read_plan, write_plan
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import capped
from bapipe.torch.health.stragglers import planned_seconds
from command import bapipe
from made_profiles import made_cluster, made_profile
from paths import REPOSITORY

MIXED = REPOSITORY / "examples" / "mixed"


@pytest.fixture(scope="module")
def slices() -> Plan:
    cluster = cluster_with(str(MIXED / "cluster.toml"), memory_limit=None, link_bandwidth=None)
    profile = profile_for(str(MIXED / "both.json"), cluster, microbatch=None, precision=None)
    # In quicker orders a V-shaped pipeline is as fast as dealing is, to 0.3 %.
    tuning = replace(DEFAULT_TUNING, moved_orders=0)
    return make_plan(explore(profile, cluster, Request(global_batch=1024), tuning=tuning))


def test_quarters_take_five_and_eighths_three(slices: Plan, tmp_path: Path) -> None:
    assert slices.kind == "data-parallel"
    (stage,) = slices.stages
    assert stage.replicas is not None
    assert [own.microbatches for own in stage.replicas] == [5, 5, 3, 3]
    assert [own.in_flight for own in stage.replicas] == [1.0] * 4
    assert slices.prediction.time == pytest.approx(1.64, abs=0.01)
    equal = next(own for own in slices.alternatives if "accumulation" in own.name)
    assert equal.time == pytest.approx(2.16, abs=0.01)
    assert plan_timeline(slices).time == pytest.approx(slices.prediction.time, rel=1e-9)
    write_plan(slices, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == slices
    planned = planned_seconds(slices)
    assert planned is not None
    assert planned == pytest.approx([own.microbatches * (own.forward + own.backward) for own in stage.replicas])


def test_the_table_says_who_takes_how_many(tmp_path: Path) -> None:
    options = ["--global-batch", "1024", "--schedule", "data-parallel", "--report", str(tmp_path / "page.html")]
    shown = bapipe("plan", str(MIXED / "both.json"), "--cluster", str(MIXED / "cluster.toml"), *options).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert any(line.startswith("localhost/0 … ×2 5 micro-batches") for line in lines)
    assert any(line.startswith("localhost/2 … ×2 3 micro-batches") for line in lines)
    assert "3 of 16 micro-batches" in (tmp_path / "page.html").read_text(encoding="utf-8")
    equal = bapipe(
        "plan",
        str(MIXED / "both.json"),
        "--cluster",
        str(MIXED / "cluster.toml"),
        *options[:4],
        "--dealing",
        "equal",
    ).stdout
    assert "2.16 s" in equal.splitlines()[0]
    assert "5 micro-batches" not in equal


@pytest.mark.parametrize("change", ["microbatches", "missing"])
def test_figures_that_the_order_contradicts_are_refused(slices: Plan, tmp_path: Path, change: str) -> None:
    (stage,) = slices.stages
    assert stage.replicas is not None
    first, *rest = stage.replicas
    replicas = (replace(first, microbatches=6), *rest) if change == "microbatches" else tuple(rest)
    write_plan(replace(slices, stages=(replace(stage, replicas=replicas),)), tmp_path / "plan.json")
    with pytest.raises(FileFormatError, match=r"its order deals 5-5-3-3; plan again"):
        read_plan(tmp_path / "plan.json")


def test_alike_replicas_are_written_as_before() -> None:
    profile = made_profile({"x": [1.0, 1.0]}, weights=[8.0, 8.0])
    plan = make_plan(explore(profile, made_cluster({"x": 3}), Request(global_batch=6, schedule="data-parallel")))
    text = dump_json(plan)
    assert plan.kind == "data-parallel"
    assert "dealing" not in text
    assert "replicas" not in text


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(BaPipeError, match="speed or equal, got 'fair'"):
        Request(dealing="fair")  # type: ignore[arg-type]


def test_each_replica_has_its_own_in_flight_count_and_memory() -> None:
    profile = made_profile({"x": [1.0, 3.0], "y": [3.0, 9.0]}, saved_activations=[10.0, 30.0], weights=[1.0, 1.0])
    chain, cluster = make_chain(profile, ("x", "y"), 1), made_cluster({"x": 2, "y": 1})
    stages = (
        StageChoice(first=0, last=0, accelerators=(0,)),
        StageChoice(first=1, last=1, accelerators=(1, 2)),
    )
    schedule = capped(2, 8, [6, 4], replicas=[1, 2], dealing=[(), (0, 0, 1, 0)])
    candidate = Candidate(label="dealt", chain=chain, stages=stages, schedule=schedule)
    types = {**cluster.types, "y": replace(cluster.types["y"], memory=40.0)}
    found = evaluate(candidate, Hardware(cluster=replace(cluster, types=types)))
    assert found.timeline.peak_in_flight_by_rank()[1:] == [3, 1]
    fast, slow = found.rank_peaks[1], found.rank_peaks[2]
    assert fast.activations == 3 * slow.activations == 90.0
    assert found.short is None
    less = {**types, "y": replace(types["y"], memory=slow.total - 1)}
    short = evaluate(candidate, Hardware(cluster=replace(cluster, types=less))).short
    assert short is not None
    assert short == (1, pytest.approx(1.0))
    # In turn the slow one holds as many as the fast one.
    even = replace(candidate, schedule=capped(2, 8, [6, 4], replicas=[1, 2]))
    assert evaluate(even, Hardware(cluster=replace(cluster, types=types))).short is not None


def _dealings(replicas: int, microbatches: int) -> list[tuple[int, ...]]:
    """Every sequence that gives each replica a micro-batch."""
    every = itertools.product(range(replicas), repeat=microbatches)
    return [own for own in every if len(set(own)) == replicas] if replicas > 1 else [()]


def _every_plan(units: int, microbatches: int) -> Iterator[tuple[tuple[StageChoice, ...], Schedule]]:
    """All pipelines of two stages on three accelerators, the first two of which may be alike or the last two."""
    for counts in ((2, 1), (1, 2)):
        for order, cut in itertools.product([(0, 1, 2), (0, 2, 1), (1, 2, 0), (2, 1, 0)], range(units - 1)):
            stages = (
                StageChoice(first=0, last=cut, accelerators=order[: counts[0]]),
                StageChoice(first=cut + 1, last=units - 1, accelerators=order[counts[0] :]),
            )
            every = (_dealings(count, microbatches) for count in counts)
            for caps, dealing in itertools.product(
                [(microbatches, 1), (microbatches, 2)], itertools.product(*every)
            ):
                yield stages, capped(2, microbatches, caps, replicas=counts, dealing=dealing)


@pytest.mark.parametrize(
    ("work", "slower", "kinds"),
    [([2.0, 1.0, 3.0], 2.0, {"x": 2, "y": 1}), ([1.0, 4.0, 1.0], 1.6, {"x": 1, "y": 2})],
)
def test_no_other_dealing_is_faster(work: list[float], slower: float, kinds: dict[str, int]) -> None:
    """Over all sequences, cuts and accelerators of small pipelines."""
    microbatches = 5
    profile = made_profile(
        {"x": work, "y": [slower * value for value in work]}, boundary=[0.2] * 3, weights=[1.0] * 3, sizes=(1,)
    )
    cluster = made_cluster(kinds, bandwidth=10.0)
    hardware, chain = Hardware(cluster=cluster), make_chain(profile, ("x", "y"), 1)
    best = min(
        evaluate(Candidate(label="tried", chain=chain, stages=stages, schedule=schedule), hardware).time
        for stages, schedule in _every_plan(3, microbatches)
    )
    found = explore(profile, cluster, Request(global_batch=microbatches, microbatch=1, schedule="1f1b"))
    assert found.best.time <= best * 1.001
