"""On PipeDream's published profiles no baseline's plan is faster, and the unreplicated optimum is PipeDream's."""

from __future__ import annotations

import numpy as np
import pytest

from bapipe.costs.profile import Profile
from bapipe.costs.segments import make_chain
from bapipe.errors import InfeasibleError
from bapipe.hardware.cluster_file import read_cluster, with_link_bandwidth
from bapipe.planner import STRATEGIES, Request, explore
from bapipe.planner.candidate import Hardware, StageChoice
from bapipe.planner.evaluate import evaluate
from bapipe.planner.partition import baselines
from bapipe.planner.partition.exact.solve import Problem, solve
from bapipe.planner.pipelines import FAMILIES, build
from pipedream_profiles import published_profile


def profile_of(name: str) -> Profile:
    return published_profile(name, batch=128)


def cluster_of(count: int, gigabytes: float):
    return with_link_bandwidth(read_cluster(f"{count}xv100"), gigabytes * 1e9)


@pytest.mark.parametrize("count", [2, 4, *(pytest.param(count, marks=pytest.mark.slow) for count in (8, 16))])
@pytest.mark.parametrize("name", ["vgg16", "resnet50", "gnmt"])
def test_no_baseline_is_faster_by_the_same_simulator(name: str, count: int) -> None:
    profile = profile_of(name)
    for gigabytes in (1, 4, 12):
        cluster = cluster_of(count, gigabytes)
        global_batch = 128 * 4 * count
        exact = explore(profile, cluster, Request(global_batch=global_batch)).best.time
        for strategy in STRATEGIES:
            try:
                other = explore(profile, cluster, Request(global_batch=global_batch, strategy=strategy)).best.time
            except InfeasibleError:
                continue
            assert exact <= other * (1 + 1e-9), f"{strategy} on {count} at {gigabytes} GB/s"


@pytest.mark.parametrize("count", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["vgg16", "resnet50", "gnmt"])
@pytest.mark.parametrize("bandwidth", [1e9, 4e9, 12e9])
def test_the_unreplicated_bottleneck_is_pipedreams_optimum(name: str, count: int, bandwidth: float) -> None:
    chain = make_chain(profile_of(name), ["v100-16"], 128)
    count = min(count, len(chain))
    send = chain.boundary_forward[:-1] / bandwidth
    theirs = baselines.pipedream(
        chain.work[0].tolist(),
        transfer=send.tolist(),
        synchronise=[0.0] * len(chain),
        machines=count,
        unreplicated=True,
    )
    problem = Problem.unlimited(
        forward=chain.forward,
        backward=chain.backward,
        counts=[count],
        microbatches=4 * count,
        num_stages=count,
        send_forward=send,
        send_backward=send,
        duplex_half=True,
    )
    found = solve(problem, minimise="bottleneck")
    assert found.bottleneck == pytest.approx(theirs.bottleneck, rel=1e-9)


@pytest.mark.parametrize("gigabytes", [1, 2, 4])
def test_vgg_on_four_finds_at_least_as_good_a_plan_as_three_and_one(gigabytes: float) -> None:
    profile, cluster = profile_of("vgg16"), cluster_of(4, gigabytes)
    chain = make_chain(profile, ["v100-16"], 128)
    hardware = Hardware(cluster=cluster)
    best = explore(profile, cluster, Request(global_batch=128 * 16)).best.time
    weights = np.cumsum(chain.weight_bytes)
    light = int(np.searchsorted(weights, 0.5 * weights[-1]))
    stages = [
        StageChoice(first=0, last=light - 1, accelerators=(0, 1, 2)),
        StageChoice(first=light, last=len(chain) - 1, accelerators=(3,)),
    ]
    for name in ("1f1b-sno", "1f1b-so", "1f1b"):
        three_one = evaluate(build(chain, stages, FAMILIES[name], 16, hardware), hardware)
        assert best <= three_one.time * (1 + 1e-9)
