"""Clusters too large to be searched as a whole: copies of a plan for a part, and what is idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bapipe.costs.profile import Profile
from bapipe.costs.segments import make_chain
from bapipe.errors import InfeasibleError
from bapipe.hardware.cluster import Accelerator, Cluster, Link
from bapipe.planner import Exploration, Request, explore, make_plan
from bapipe.planner.candidate import Candidate, Hardware, StageChoice, as_run
from bapipe.planner.cluster_parts import copies_on, parts_of
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.hybrids import copies_of
from bapipe.planner.pipelines import FAMILIES, build
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.planner.tuning import Tuning
from bapipe.schedule.replicas import replicated_pipelines
from bapipe.simulator.first_pipeline import first_copy
from made_profiles import made_cluster, made_profile

LAYERS = 12
WORK = [1.0 + 0.1 * (index % 3) for index in range(LAYERS)]
LARGE = Tuning(thorough_size=4 * LAYERS, whole_actions=2_000)
"""clusters of five accelerators or more are large ones, parts of up to four are searched in full"""


def nodes(counts: dict[str, int], *, each: int = 4, **more: object) -> Cluster:
    """Accelerators in nodes of so many, with slower links between these."""
    flat = made_cluster(counts, bandwidth=8.0, **more)  # type: ignore[arg-type]
    placed = tuple(
        Accelerator(name=f"n{index // each}/{index % each}", type=item.type, node=f"n{index // each}")
        for index, item in enumerate(flat.accelerators)
    )
    return replace(flat, accelerators=placed, between=Link(bandwidth=1.0, latency=0.05))


def profile_of(types: tuple[str, ...] = ("x",), *, sizes: Sequence[int] = (1, 2, 4)) -> Profile:
    work = {name: [own * (1 + number) for own in WORK] for number, name in enumerate(types)}
    return made_profile(
        work,
        boundary=[0.3] * LAYERS,
        weights=[4.0] * LAYERS,
        saved_activations=[1.0] * LAYERS,
        sizes=sizes,
    )


def spelt_out(copied: Candidate) -> Candidate:
    """The same with the schedule of all copies."""
    schedule = replicated_pipelines([copied.schedule] * copied.copies)
    return replace(copied, schedule=schedule, copies=1)


def assert_same(one: Evaluation, other: Evaluation) -> None:
    assert one.time == pytest.approx(other.time, rel=1e-9)
    assert one.samples == other.samples
    assert one.memory == pytest.approx(other.memory, rel=1e-9)
    assert one.inflight == other.inflight
    assert one.costs == other.costs
    assert one.timeline.bubble == pytest.approx(other.timeline.bubble, rel=1e-9)
    exposed = (max(own.timeline.exposed_communication()) for own in (one, other))
    assert next(exposed) == pytest.approx(next(exposed), rel=1e-9)


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("bus", [None, 6.0])
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1), (1, 2, 1), (3,)], ids=str)
def test_few_copies_take_as_long_as_all(counts: tuple[int, ...], bus: float | None, near: bool) -> None:
    """Pipelines of three or four on nodes of four: copies lie on nodes in different ways."""
    each = sum(counts)
    cluster = nodes({"x": 4 * each}, bus_bandwidth=bus)
    hardware, profile = Hardware(cluster=cluster), profile_of()
    part = next(part for part in parts_of(cluster, 16) if len(part) == each)
    assert part.copies == 4
    chain, bounds, taken = make_chain(profile, ("x",), 1), [0, 5, 9, LAYERS], 0
    bounds = [*bounds[: len(counts)], LAYERS]
    stages = []
    for number, count in enumerate(counts):
        members = tuple(range(taken, taken + count))
        taken += count
        stages.append(StageChoice(first=bounds[number], last=bounds[number + 1] - 1, accelerators=members))
    own = Hardware(cluster=part.cluster)
    copied = copies_on(part, build(chain, stages, FAMILIES["1f1b"], 13, own), near=near)
    assert_same(evaluate(copied, hardware), evaluate(spelt_out(copied), hardware))


def test_recomputation_and_split_backwards_are_copied() -> None:
    cluster = nodes({"x": 8})
    hardware, part = Hardware(cluster=cluster), next(p for p in parts_of(cluster, 8) if len(p) == 2)
    chain = make_chain(profile_of(), ("x",), 1)
    for family, again in (("1f1b", True), ("zb", False)):
        stages = [
            StageChoice(first=0, last=5, accelerators=(0,), recompute=again),
            StageChoice(first=6, last=LAYERS - 1, accelerators=(1,)),
        ]
        copied = copies_on(part, build(chain, stages, FAMILIES[family], 9, Hardware(cluster=part.cluster)))
        assert_same(evaluate(copied, hardware), evaluate(spelt_out(copied), hardware))


@pytest.fixture(scope="module")
def sixteen() -> Exploration:
    """A model that one accelerator has no room for, on four nodes of four with fast links."""
    cluster = replace(nodes({"x": 16}, memory=40.0), between=Link(bandwidth=1e3))
    return explore(profile_of(sizes=(1,)), cluster, Request(global_batch=128), tuning=LARGE)


def test_copies_are_as_fast_as_the_plan_for_a_part(sixteen: Exploration) -> None:
    """Four copies of the plan for four accelerators are a candidate for sixteen."""
    cluster = sixteen.hardware.cluster
    part = replace(cluster, accelerators=cluster.accelerators[:4])
    quarter = explore(profile_of(sizes=(1,)), part, Request(global_batch=32))
    assert sixteen.best.time <= 1.01 * quarter.best.time


def test_the_plan_file_has_one_pipeline_and_stands_for_all(sixteen: Exploration) -> None:
    """What is read from it are the lanes of every copy, and they take what was predicted."""
    best = sixteen.best
    assert best.candidate.copies == 4
    assert len(best.candidate.stages) == 4
    plan = make_plan(sixteen)
    lanes = len(as_run(best.candidate).lanes)
    assert plan.schedule.copies == best.candidate.copies
    assert len(plan.schedule.lanes) == lanes
    schedule = plan.schedule.to_schedule()
    assert len(schedule.lanes) == lanes * best.candidate.copies
    whole = replicated_pipelines([as_run(best.candidate)] * best.candidate.copies)
    assert schedule.lanes == whole.lanes
    assert (schedule.placement, schedule.caps) == (whole.placement, whole.caps)
    assert plan_timeline(plan).time == pytest.approx(plan.prediction.time, rel=1e-9)
    assert plan.microbatches * plan.microbatch_size == plan.global_batch == 128


def test_one_copy_is_drawn(sixteen: Exploration) -> None:
    best = sixteen.best
    ranks = best.candidate.schedule.num_ranks
    drawn = first_copy(best.timeline, best.schedule.num_ranks // ranks)
    assert drawn.num_ranks == ranks
    assert drawn.num_microbatches == best.candidate.schedule.num_microbatches
    assert drawn.time == pytest.approx(best.timeline.time)
    assert drawn.bubble == pytest.approx(best.timeline.bubble)
    assert len(drawn.transfers) == len(best.timeline.transfers) * ranks // best.schedule.num_ranks


def test_larger_clusters_train_as_many_samples_per_accelerator() -> None:
    """Where one accelerator has no room for the model."""
    profile = profile_of(sizes=(2,))
    rates = []
    for count in (16, 128, 1024):
        cluster = nodes({"x": count}, each=8, memory=60.0)
        cluster = replace(cluster, between=Link(bandwidth=8.0))
        found = explore(profile, cluster, Request(global_batch=32 * count), tuning=LARGE)
        assert found.best.short is None
        assert found.best.candidate.copies > 1
        rates.append(found.best.throughput / count)
    assert rates[1] >= 0.97 * rates[0]
    assert rates[2] >= 0.97 * rates[1]


@pytest.mark.parametrize(("layers", "memory", "copies"), [(6, 36.0, 2), (4, 30.0, 3)])
def test_where_memory_lacks_a_dozen_train_as_many_samples_as_parts_of_them(
    layers: int, memory: float, copies: int
) -> None:
    """Layers that recompute are chosen for a part, whose plan then runs in copies."""
    profile = made_profile(
        {"x": [1.0] * layers}, boundary=[0.3] * layers, weights=[4.0] * layers, saved_activations=[4.0] * layers
    )

    def found(cluster: Cluster, global_batch: int) -> Exploration:
        kinds = {name: replace(item, memory=memory) for name, item in cluster.types.items()}
        return explore(
            profile, replace(cluster, types=kinds), Request(global_batch=global_batch, optimizer="adam")
        )

    whole = nodes({"x": 12})
    all_of_it, part = found(whole, 48), found(whole.part(whole.accelerators[: 12 // copies]), 48 // copies)
    assert all_of_it.best.candidate.chain.recompute
    copied = [
        evaluate(own, all_of_it.hardware)
        for own in copies_of(part.best.candidate, copies, all_of_it.hardware.cluster)
    ]
    assert all_of_it.best.throughput >= max(own.throughput for own in copied if own.short is None) * (1 - 1e-9)


def test_mixed_clusters_are_divided_by_type() -> None:
    cluster = nodes({"x": 12, "y": 8})
    sizes = {(part.copies, len(part)) for part in parts_of(cluster, 64)}
    assert sizes == {(1, 20), (2, 10), (4, 5), (8, 2)}
    part = next(part for part in parts_of(cluster, 64) if part.copies == 4)
    assert [item.type for item in part.cluster.accelerators] == ["x", "x", "x", "y", "y"]
    assert sorted(index for row in part.apart for index in row) == list(range(20))
    for row in (*part.apart, *part.near):
        assert len({cluster.accelerators[index].type for index in row}) == 1
    few = replace(LARGE, whole_actions=100)
    found = explore(profile_of(("x", "y")), cluster, Request(global_batch=64), tuning=few)
    assert found.best.candidate.copies > 1


def test_idle_accelerators_are_explained() -> None:
    """Ten do not go into parts that divide eight samples."""
    found = explore(profile_of(sizes=(1,)), nodes({"x": 10}), Request(global_batch=8), tuning=LARGE)
    used = {index for stage in found.best.candidate.stages for index in stage.accelerators}
    notes = [note for note in make_plan(found).notes if "idle" in note]
    assert len(used) < 10
    assert len(notes) == 1
    assert notes[0].startswith(f"{10 - len(used)} of 10 accelerators are idle: ")


@pytest.mark.parametrize(
    ("asked", "layers", "note"),
    [
        (Request(global_batch=8, stages=2), 2, "1 of 3 accelerators are idle: --stages 2 asks for"),
        (Request(global_batch=7), 1, "2 of 3 accelerators are idle: a pipeline has at most one stage per layer"),
    ],
)
def test_idle_accelerators_of_small_clusters_are_explained(asked: Request, layers: int, note: str) -> None:
    profile = made_profile({"x": [1.0] * layers}, sizes=(1, 7))
    plan = make_plan(explore(profile, made_cluster({"x": 3}), asked))
    assert [own.startswith(note) for own in plan.notes if "idle" in own] == [True]


def test_no_note_where_all_have_work() -> None:
    plan = make_plan(explore(profile_of(), made_cluster({"x": 4}), Request(global_batch=32)))
    assert not [note for note in plan.notes if "idle" in note]


def test_what_does_not_fit_on_any_part_says_what_would_help() -> None:
    with pytest.raises(InfeasibleError, match="any of these would help"):
        explore(profile_of(), nodes({"x": 16}, memory=1.0), Request(global_batch=64), tuning=LARGE)


@pytest.mark.parametrize("schedule", ["data-parallel", "zb", "1f1b-sno"])
def test_a_schedule_that_is_asked_for_is_the_one_that_is_copied(schedule: str) -> None:
    asked = Request(global_batch=64, schedule=schedule)
    found = explore(profile_of(sizes=(1, 2)), nodes({"x": 16}), asked, tuning=replace(LARGE, whole_actions=200))
    assert found.best.candidate.schedule.name == schedule
    assert found.best.candidate.copies > 1
