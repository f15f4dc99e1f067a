"""Costs and memory in every precision: computed profiles, casts of weights, master weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bapipe.costs.optimizers import find_optimizer, optimizer_text, parse_optimizer, same_step
from bapipe.costs.planned_optimizer import planned_optimizer
from bapipe.costs.profile import Profile
from bapipe.costs.segments import Chain, make_chain
from bapipe.costs.stage_memory import UnitBytes, every_run_bytes, stage_bytes
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster_file import read_cluster
from bapipe.hardware.precision import find_precision
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.inputs import profile_for

CLUSTER = read_cluster("4xa100")
TYPE = CLUSTER.accelerators[0].type


def profile(precision: str, model: str = "gpt2") -> Profile:
    return profile_for(model, CLUSTER, microbatch=4, precision=precision)


def chain(precision: str) -> Chain:
    return make_chain(profile(precision), (TYPE,), 4)


def test_mixed_precision_has_fp32_weights_and_messages_of_two_bytes() -> None:
    full, mixed, low = (profile(word) for word in ("fp32", "bf16-mixed", "bf16"))
    assert (mixed.weight_bytes == full.weight_bytes).all()
    assert (mixed.weight_bytes == 2 * low.weight_bytes).all()
    costs = {word: found.at(TYPE, 4) for word, found in (("full", full), ("mixed", mixed), ("low", low))}
    assert (costs["mixed"].boundary_forward == costs["low"].boundary_forward).all()
    assert (costs["mixed"].saved_activations == costs["low"].saved_activations).all()
    assert (costs["mixed"].forward == costs["low"].forward).all()
    assert costs["low"].backward.sum() < costs["mixed"].backward.sum() < costs["full"].backward.sum()
    assert costs["mixed"].weight_casts.tolist() == (mixed.weight_bytes / 2).tolist()
    assert not costs["full"].weight_casts.any()
    assert not costs["low"].weight_casts.any()


def test_casts_are_counted_in_one_place() -> None:
    """Whoever weighs a stage, exactly or roughly, has them once, however much of the weights it counts."""
    mixed = chain("bf16-mixed")
    plain = replace(mixed, weight_casts=np.zeros(len(mixed)))
    last = len(mixed) - 1
    casts = float(mixed.weight_casts.sum())
    assert casts == 2 * sum(layer.parameters for layer in mixed.profile.layers if not layer.shares_weights_with)
    with_casts, without = (stage_bytes(item, 0, last) for item in (mixed, plain))
    for copies in (1, 4):
        for recompute in (False, True):
            kwargs = {"recompute": recompute}
            assert with_casts.fixed(copies, **kwargs) - without.fixed(copies, **kwargs) == pytest.approx(casts)
    rough = [UnitBytes.of(item).held(0, last, 4, 2) for item in (mixed, plain)]
    assert rough[0] - rough[1] == pytest.approx(casts)
    every = every_run_bytes(mixed)
    assert every.casts[0, last] == pytest.approx(casts)
    assert every.casts[3, 5] == pytest.approx(float(mixed.weight_casts[3:6].sum()))


def test_a_plan_counts_casts_among_the_weights() -> None:
    request = Request(global_batch=64, microbatch=4, schedule="1f1b-so", stages=4)
    plan = make_plan(explore(profile("bf16-mixed"), CLUSTER, request))
    assert plan.dtype == "bf16-mixed"
    assert plan.precision == find_precision("bf16-mixed")
    for stage in plan.stages:
        assert stage.memory_parts is not None
        assert stage.memory_parts.weights == pytest.approx(1.5 * stage.weight_bytes)
        assert stage.memory_parts.gradients == pytest.approx(stage.weight_bytes)


@pytest.mark.parametrize(
    ("optimizer", "precision", "state"),
    [
        ("adamw", "fp32", 8),
        ("adamw", "bf16-mixed", 8),
        ("adamw", "bf16", 4),
        ("adamw(master_weights=true)", "bf16", 12),
        ("sgd(master_weights=true)", "fp16", 4),
    ],
)
def test_bytes_of_the_optimizer(optimizer: str, precision: str, state: float) -> None:
    found, size = profile(precision), find_precision(precision).weight_bytes
    assert planned_optimizer(found, [TYPE], optimizer).memory.state * size == state


def test_master_weights_are_for_weights_of_16_bits() -> None:
    for precision in ("fp32", "bf16-mixed"):
        with pytest.raises(BaPipeError, match=rf"those of {precision} are fp32; leave it out, or give"):
            planned_optimizer(profile(precision), [TYPE], "adam(master_weights=true)")


def test_a_fused_step_has_no_temporary_tensors() -> None:
    assert find_optimizer("adamw(fused=true)").workspace == 0
    assert find_optimizer("adamw").workspace == 1
    assert same_step("adam(fused=true)") == ("adamw(fused=true)",)


def test_an_optimizer_is_one_text() -> None:
    text = optimizer_text("adamw", ("fused=true", "weight_decay=0.1"), master_weights=True)
    assert text == "adamw(fused=true,master_weights=true,weight_decay=0.1)"
    spec = parse_optimizer(text)
    assert (spec.name, dict(spec.options), spec.master_weights) == (
        "adamw",
        {"fused": True, "weight_decay": 0.1},
        True,
    )
    assert str(spec) == text
    assert optimizer_text("torch.optim:RMSprop", (), master_weights=False) == "torch.optim:RMSprop"
    assert optimizer_text(None, (), master_weights=False) is None
    with pytest.raises(BaPipeError, match="belong to an optimizer; give --optimizer too"):
        optimizer_text(None, ("fused=true",), master_weights=False)
    with pytest.raises(BaPipeError, match=r"looks like adamw or adamw\(fused=true\), got 'adamw\(fused'"):
        parse_optimizer("adamw(fused")
