"""A plan is for the optimizer that was profiled, with the memory that was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bapipe.costs.optimizers import find_optimizer
from bapipe.costs.planned_optimizer import planned_optimizer
from bapipe.costs.profile import Profile
from bapipe.costs.resolve_model import load_profile
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster_file import read_cluster
from bapipe.planner import Request, explore, make_plan

CLUSTER = read_cluster("2xv100")


def profiled(**changes: object) -> Profile:
    """VGG-16's costs, as if measured with another optimizer."""
    found = load_profile("vgg16", types=list(CLUSTER.types.values()), microbatches=[8, 16, 32])
    return replace(found, accelerators={"v100-16": replace(found.table("v100-16"), **changes)})  # type: ignore[arg-type]


def test_the_profiles_optimizer_is_planned_unless_another_is_named() -> None:
    assert planned_optimizer(profiled(), ["v100-16"], None).name == "sgd"
    assert planned_optimizer(profiled(optimizer="adam"), ["v100-16"], None).name == "adam"
    assert planned_optimizer(profiled(optimizer="adam"), ["v100-16"], "adamw").name == "adamw"
    two = profiled(optimizer="adam")
    two = replace(two, accelerators={**two.accelerators, "a100": profiled(optimizer="sgd").table("v100-16")})
    with pytest.raises(BaPipeError, match="measured with adam and sgd; say which with --optimizer"):
        planned_optimizer(two, ["v100-16", "a100"], None)


def test_measured_memory_counts_before_the_table() -> None:
    """Bytes per parameter, in copies of fp32 weights; another optimizer than the measured one has the table's."""
    known = profiled(optimizer="my:Lion", optimizer_state=2.0, optimizer_workspace=4.0)
    found = planned_optimizer(known, ["v100-16"], None)
    assert (found.name, found.memory.state, found.memory.workspace) == ("my:Lion", 0.5, 1.0)
    assert planned_optimizer(known, ["v100-16"], "adam").memory == find_optimizer("adam")
    with pytest.raises(BaPipeError, match=r"unknown optimizer 'my:Other'.*a profile that was measured with it"):
        planned_optimizer(known, ["v100-16"], "my:Other")


def test_the_plan_has_its_name_and_its_bytes() -> None:
    request = Request(global_batch=64, microbatch=16, schedule="1f1b-sno", stages=2)
    plain = make_plan(explore(profiled(), CLUSTER, request))
    heavy = make_plan(explore(profiled(optimizer="my:Lion", optimizer_state=12.0), CLUSTER, request))
    assert (plain.optimizer, heavy.optimizer) == ("sgd", "my:Lion")
    for stage in heavy.stages:
        assert stage.memory_parts is not None
        assert stage.memory_parts.optimizer == pytest.approx(3 * stage.memory_parts.weights)
