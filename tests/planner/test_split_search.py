"""Divided layers in the search: all that may be divided are tried, and what parts cost decides."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapipe.costs.profile import Profile
from bapipe.costs.segments import Chain, make_chain
from bapipe.costs.stage_memory import every_run_bytes, stage_bytes
from bapipe.costs.stage_time import every_run, stage_seconds
from bapipe.errors import InfeasibleError
from bapipe.models.layers import Split
from bapipe.planner import Request, explore
from bapipe.planner.candidate import Hardware
from bapipe.planner.intra_layer_cuts import divided_stages, refined
from bapipe.planner.pipelines import FAMILIES, unreplicated_stages
from example_counts import examples
from made_profiles import made_cluster, made_profile

TRANSLATION = [0.01, 0.68, 0.51, 0.37, 0.36, 0.01, 0.36, 0.25, 0.52, 0.52, 0.53, 1.17]
"""seconds of the layers of a recurrent translator: uneven, and all but one can be divided"""
SPLITS = {0: 16, 1: 2, 2: 50, 3: 50, 4: 50, 5: 16, 6: 50, 8: 50, 9: 50, 10: 50, 11: 1000}
SCHEDULES = ("1f1b-sno", "1f1b-so", "1f1b", "gpipe", "zb-h1", "zb-h2", "interleaved", "data-parallel")


@pytest.mark.parametrize("schedule", [None, "zb-h2", "1f1b-so"])
def test_the_automatic_depth_is_as_good_as_the_forced_one(schedule: str | None) -> None:
    """The layers beside the cuts of the best undivided plan are not those that divided plans divide."""
    profile = made_profile({"x": TRANSLATION}, sizes=(1,), split=SPLITS, boundary=[0.01] * 12)
    cluster = made_cluster({"x": 7}, bandwidth=1.0)
    request = Request(global_batch=32, schedule=schedule, split_layers=True)
    free, forced = (explore(profile, cluster, item).best for item in (request, replace(request, stages=7)))
    assert free.time <= forced.time * (1 + 1e-12)
    undivided = replace(request, stages=7, split_layers=False)
    assert free.time < 0.99 * explore(profile, cluster, undivided).best.time


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """A few layers, some of which may be divided at a price."""
    count = draw(st.integers(3, 5))
    figures = st.lists(st.integers(1, 9), min_size=count, max_size=count)
    channels = draw(st.lists(st.sampled_from([0, 2, 3, 4]), min_size=count, max_size=count))
    split = {index: number for index, number in enumerate(channels) if number}
    made = made_profile(
        {"x": draw(figures)},
        boundary=[value / 4 for value in draw(figures)],
        weights=draw(figures),
        saved_activations=draw(figures),
        sizes=(1,),
        split=split,
    )
    price = draw(st.sampled_from([0.0, 0.05, 0.5]))
    row = tuple(price * value if index in split else 0.0 for index, value in enumerate(made.table("x").forward[0]))
    by = draw(st.sampled_from(["output channels", "time steps"]))
    layers = tuple(
        layer if layer.split is None else replace(layer, split=Split(channels=layer.split.channels, by=by))
        for layer in made.layers
    )
    library = tuple(draw(st.lists(st.sampled_from([0.0, 7.0]), min_size=len(row), max_size=len(row))))
    least = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(row), max_size=len(row)))
    passing = tuple(share * out for share, out in zip(least, made.table("x").boundary_forward[0], strict=True))
    taken = (0.0, *made.table("x").boundary_forward[0][:-1])
    kept = tuple(min(pair) for pair in zip(taken, made.table("x").saved_activations[0], strict=True))
    table = replace(
        made.table("x"),
        kept_input=draw(st.sampled_from([None, (kept,), ((0.0,) * count,)])),
        part_forward=(row,),
        part_backward=(row,),
        part_saved_activations=(row,),
        library=library,
        passing_forward=(passing,),
        passing_backward=(passing,),
    )
    return replace(made, layers=layers, accelerators={"x": table})


@given(profiles(), st.integers(2, 3), st.sampled_from(SCHEDULES), st.integers(1, 3), st.sampled_from([60.0, 1e9]))
@settings(max_examples=examples(30))
def test_the_automatic_choice_is_never_worse_than_a_forced_one(
    profile: Profile, count: int, schedule: str, depth: int, memory: float
) -> None:
    cluster = made_cluster({"x": count}, bandwidth=5.0, memory=memory)
    request = Request(global_batch=6, split_layers=True)
    least = 2 if schedule == "interleaved" else 1
    stages = 1 if schedule == "data-parallel" else min(max(least, depth), count)
    try:
        best = explore(profile, cluster, replace(request, schedule=schedule, stages=stages)).best
    except InfeasibleError:
        return
    assert explore(profile, cluster, request).best.time <= best.time * (1 + 1e-12)


def work_of(chain: Chain, first: int, last: int) -> float:
    """Seconds of the units, and what a part of a layer costs at each end that lies inside one."""
    ends = [first] * (chain.units[first].start > 0) + [last] * (chain.units[last].stop < chain.units[last].of)
    more = sum(float(chain.part_forward[0, unit] + chain.part_backward[0, unit]) for unit in ends)
    return float(chain.work[0, first : last + 1].sum()) + more


def straightforward(chain: Chain, count: int, live: list[int], memory: float) -> list[tuple[float, float]]:
    """(fill, longest stage) of every way to cut, that fits, at no cost of communication."""
    found = []
    for cuts in combinations(range(len(chain) - 1), count - 1):
        ends = (*cuts, len(chain) - 1)
        times, fits = [], True
        for index, (first, last) in enumerate(zip([0, *(cut + 1 for cut in cuts)], ends, strict=True)):
            needed = stage_bytes(chain, first, last)
            times.append(work_of(chain, first, last))
            static = 2 * needed.weights + needed.buffers + needed.workspace
            fits &= static + live[index] * needed.saved_activations <= memory * (1 + 1e-12)
        if fits:
            found.append((sum(times), max(times)))
    return found


@given(profiles(), st.integers(2, 4), st.sampled_from([90.0, 140.0, 1e9]))
@settings(max_examples=examples(60))
def test_the_cuts_are_those_of_trying_all(profile: Profile, count: int, memory: float) -> None:
    chain = refined(make_chain(profile, ["x"], 1))
    if len(chain) < count:
        return
    hardware = Hardware(cluster=made_cluster({"x": count}, memory=memory))
    family, microbatches = FAMILIES["1f1b-so"], 8
    start = unreplicated_stages([*range(count - 1), len(chain) - 1], range(count))
    made = divided_stages(chain, start, hardware, family, microbatches)
    live = [family.inflight(count - index, count, microbatches) for index in range(count)]
    every = straightforward(chain, count, live, memory)
    assert bool(made) == bool(every)
    if not every:
        return
    times = []
    for stages in made:
        assert [stage.accelerators for stage in stages] == [(index,) for index in range(count)]
        assert (stages[0].first, stages[-1].last) == (0, len(chain) - 1)
        work = [work_of(chain, stage.first, stage.last) for stage in stages]
        times.append((sum(work), max(work)))
    least = min(longest for _, longest in every)
    assert times[0][1] == pytest.approx(least)
    best = min(fill + (microbatches - 1) * longest for fill, longest in every)
    assert times[-1][0] + (microbatches - 1) * times[-1][1] <= best * 1.05


@given(profiles())
@settings(max_examples=examples(40))
def test_all_runs_at_once_are_weighed_and_timed_as_one_by_one(profile: Profile) -> None:
    chain = refined(make_chain(profile, ["x"], 1))
    runs = [(first, last) for last in range(len(chain)) for first in range(last + 1)]
    every, alone = every_run(chain, 0), stage_seconds(chain, runs)
    for name in ("forward", "backward", "work", "weight_gradient", "parting", "update"):
        table = getattr(every, name)
        assert [table[run] for run in runs] == pytest.approx(getattr(alone, name).tolist())
    weighed = every_run_bytes(chain)
    for run in runs:
        own = stage_bytes(chain, *run)
        for name in ("weights", "saved_activations", "delayed", "buffers", "workspace"):
            assert getattr(weighed, name)[run] == pytest.approx(getattr(own, name)), (name, run)
        assert weighed.kept[run[0], 0] == own.kept
    assert alone.work.tolist() == pytest.approx([work_of(chain, *run) for run in runs])
