"""A plan counts a tied weight on every rank that holds it, as the runtime places it."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from bapipe.costs.profile import Profile
from bapipe.costs.roofline import analytic_profile
from bapipe.hardware.cluster_file import read_cluster
from bapipe.planner import Request, explore, make_plan
from bapipe.torch.capturing import capture
from bapipe.torch.capturing.captured import Captured
from bapipe.torch.runtime.build_stages import stage_parameters
from bapipe.torch.zoo import build_gpt


@functools.cache
def model() -> tuple[Captured, Profile]:
    module, args, kwargs = build_gpt(blocks=3, width=16, vocabulary=30, sequence=6, with_loss=True)
    captured = capture(module, args, kwargs)
    kind = read_cluster("2xv100").types["v100-16"]
    return captured, analytic_profile(captured.to_model("gpt"), [kind], precision="fp32", microbatches=[1, 2])


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("1f1b", 3), ("zb-v", 2), ("interleaved", 2)])
def test_ranks_hold_what_the_plan_counts(schedule: str, stages: int) -> None:
    captured, profile = model()
    request = Request(global_batch=4, microbatch=1, schedule=schedule, stages=stages)
    plan = make_plan(explore(profile, read_cluster(f"{stages}xv100"), request))
    sizes = {name: tensor.numel() * 4 for name, tensor in captured.module.named_parameters()}
    users = stage_parameters(captured, plan)
    assert users["tokens.weight"] == (0, len(plan.stages) - 1)
    for rank in plan.ranks:
        own = [index for index, stage in enumerate(plan.stages) if rank in stage.accelerators]
        held = {name for name, holders in users.items() if set(holders) & set(own)}
        assert sum(plan.stages[index].weight_bytes for index in own) == sum(sizes[name] for name in held)
        parts = plan.stages[own[0]].memory_parts
        assert parts is not None
        assert parts.weights == sum(sizes[name] for name in held)


def test_a_copy_is_trained_and_cast_as_what_it_is_a_copy_of() -> None:
    _, profile = model()
    (table,) = profile.accelerators.values()
    cluster = read_cluster("2xv100")
    request = Request(global_batch=4, microbatch=1, schedule="1f1b", stages=2)
    last = make_plan(explore(profile, cluster, request)).stages[-1]
    assert last.trainable_bytes is None
    assert last.tied == ("tokens",)
    weights = profile.weight_bytes
    frozen = tuple(0.0 if index == 0 else float(size) for index, size in enumerate(weights))
    own = replace(table, trainable_bytes=frozen)
    kept = replace(profile, accelerators=dict.fromkeys(profile.accelerators, own))
    last = make_plan(explore(kept, cluster, request)).stages[-1]
    assert last.trainable_bytes == last.weight_bytes - profile.layers[-1].weight_bytes
