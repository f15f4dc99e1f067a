"""A GPT-2 with adapters, its own weights frozen: profiled, planned as it is held, trained as in one process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")
pytest.importorskip("transformers", reason="GPT-2 is that of transformers")

import torch
from run_plans import CPU

import lora_gpt2
from bapipe.costs.profile import Profile
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.hardware.cluster import Accelerator, Cluster, Link
from bapipe.models.layers import ModelRef
from bapipe.planner import Request, explore, make_plan
from bapipe.records.plan import Plan, write_plan
from bapipe.torch.capturing import Captured, capture
from bapipe.torch.inputs.make_optimizer import make_optimizer
from bapipe.torch.profiler.measure_settings import MeasureSettings
from bapipe.torch.profiler.profile_module import profile_module
from bapipe.torch.runtime.build_stages import check_model, own_stages

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
BATCH = 4


def _cluster(memory: float = CPU.memory) -> Cluster:
    return Cluster(
        name="two-cpus",
        accelerators=tuple(
            Accelerator(name=f"localhost/{index}", type=CPU.name, node="localhost") for index in range(2)
        ),
        types={CPU.name: replace(CPU, memory=memory)},
        within=Link(bandwidth=1e9, latency=5e-5),
    )


def _profiled(function: str, cache: Path, **args: int) -> Profile:
    module, example = getattr(lora_gpt2, function)(**args)
    return profile_module(
        module,
        example,
        model=ModelRef(name="lora-gpt2", ref=f"lora_gpt2:{function}", args=dict(args)),
        settings=MeasureSettings(microbatches=(1,), iterations=1, folder=cache),
        optimizer="momentum",
        accelerator=CPU.name,
        threads=1,
    ).profile


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Every block has adapters."""
    return _profiled("build", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def adapted_late(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Only the last block has."""
    return _profiled("build", tmp_path_factory.mktemp("cache-late"), first=2)


def _plan(profile: Profile, schedule: str, *, memory: float = CPU.memory, strategy: str = "parameters") -> Plan:
    request = Request(
        global_batch=BATCH, microbatch=1, schedule=schedule, stages=2, strategy=strategy, optimizer="momentum"
    )
    return make_plan(explore(profile, _cluster(memory), request))


def _held(captured: Captured, plan: Plan, stage: int) -> tuple[int, int, int, int]:
    """Bytes of a rank's parameters and buffers, of those that require a gradient, and of the optimizer's state."""
    own = own_stages(
        captured, plan, plan.schedule.to_schedule(), rank=stage, sizes=(1,), device=torch.device("cpu")
    ).stages[stage][1]
    used = {name for layer in captured.layers for name in layer.buffers}
    parameters = dict(own.named_parameters())
    buffers = sum(item.nbytes for name, item in own.named_buffers() if name in used)
    weights = buffers + sum(item.nbytes for item in parameters.values())
    trained = sum(item.nbytes for item in parameters.values() if item.requires_grad)
    optimizer = make_optimizer("momentum", list(parameters.values()), rate=0.1)
    state = 0
    if optimizer is not None:
        for item in parameters.values():
            item.grad = torch.zeros_like(item) if item.requires_grad else None
        optimizer.step()
        state = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values())
    gradients = sum(item.grad.nbytes for item in parameters.values() if item.grad is not None)
    return weights, trained, gradients, state


@pytest.mark.parametrize("first", [0, 2])
def test_planned_static_memory_is_what_requires_grad_says(
    first: int, adapted: Profile, adapted_late: Profile
) -> None:
    plan = _plan(adapted_late if first else adapted, "1f1b-sno")
    module, example = lora_gpt2.build(first=first)
    parameters = list(module.parameters())
    total = sum(item.numel() for item in parameters)
    assert sum(item.numel() for item in parameters if item.requires_grad) <= 0.01 * total
    captured = capture(module, example, check=False)
    for index, stage in enumerate(plan.stages):
        weights, trained, gradients, state = _held(captured, plan, index)
        assert gradients == trained
        assert stage.weight_bytes == weights
        assert (stage.weight_bytes if stage.trainable_bytes is None else stage.trainable_bytes) == trained
        assert stage.memory_parts is not None
        assert (stage.memory_parts.weights, stage.memory_parts.optimizer) == (weights, state)


def test_it_fits_where_training_all_of_it_does_not(adapted: Profile) -> None:
    """The same costs, once with all parameters trained, as profiles without `trainable_bytes` say."""
    table = adapted.accelerators[CPU.name]
    everything = replace(adapted, accelerators={CPU.name: replace(table, trainable_bytes=None)})
    need = max(stage.memory_bytes for stage in _plan(adapted, "1f1b-sno", strategy="exact").stages)
    with pytest.raises(InfeasibleError, match="nothing fits"):
        _plan(everything, "1f1b-sno", memory=1.05 * need, strategy="exact")
    assert _plan(adapted, "1f1b-sno", memory=1.05 * need, strategy="exact").stages


def test_layers_before_the_first_adapter_have_no_backward(adapted_late: Profile) -> None:
    table = adapted_late.accelerators[CPU.name]
    assert table.trainable_bytes is not None
    first = next(index for index, size in enumerate(table.trainable_bytes) if size)
    assert adapted_late.layers[first].name == "model.transformer.h.2.attn"
    assert set(table.backward[0][:first]) == set(table.boundary_backward[0][:first]) == {0.0}
    assert table.backward[0][first] > 0
    assert table.weight_gradient is not None
    others = [
        value for value, size in zip(table.weight_gradient[0], table.trainable_bytes, strict=True) if not size
    ]
    assert set(others) == {0.0}


def _run(plan: Plan, folder: Path, *options: str) -> str:
    write_plan(plan, folder / "plan.json")
    path = os.pathsep.join(filter(None, (str(HELPERS), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-m", "bapipe", "run", str(folder / "plan.json"), "--steps", "2", *options],
        env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_frozen_first_stage_runs_ahead_and_gradients_are_equal(adapted_late: Profile, tmp_path: Path) -> None:
    """1F1B: rank 0 has nothing to train, no gradient comes back to it, and its optimizer has no parameters."""
    plan = _plan(adapted_late, "1f1b-sno")
    assert plan.stages[0].trainable_bytes == 0
    assert not plan.stages[1].sends_gradient
    assert "gradients differ from one process" in _run(plan, tmp_path, "--check")


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_under_another_plan(adapted_late: Profile, tmp_path: Path) -> None:
    """Frozen weights are saved and loaded; a rank without an optimizer saves none of its state."""
    saved = ("--checkpoint", str(tmp_path / "saved"))
    _run(_plan(adapted_late, "1f1b-sno"), tmp_path, *saved)
    gone_on = _run(_plan(adapted_late, "gpipe", strategy="time"), tmp_path, *saved, "--resume", "--steps", "3")
    assert "after 2 steps" in gone_on


def test_gradients_are_equal_in_zero_bubble(adapted: Profile, tmp_path: Path) -> None:
    plan = _plan(adapted, "zb-h1")
    assert any(action.startswith("1W") for action in plan.schedule.lanes[1].actions)
    assert "gradients differ from one process" in _run(plan, tmp_path, "--check")


def test_a_model_of_which_more_is_trained_is_refused(adapted_late: Profile) -> None:
    plan = _plan(adapted_late, "1f1b-sno")
    module, example = lora_gpt2.build(first=2)
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    with pytest.raises(BaPipeError, match="freeze the same parameters, or profile and plan it again"):
        check_model(capture(module, example, check=False), plan)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="the library peft is not installed")
def test_a_model_of_peft(tmp_path: Path) -> None:
    profile = _profiled("build_peft", tmp_path / "cache")
    plan = _plan(profile, "1f1b-sno")
    trained = sum(stage.trainable_bytes or 0.0 for stage in plan.stages)
    module, _ = lora_gpt2.build_peft()
    assert trained == sum(item.nbytes for item in module.parameters() if item.requires_grad)
    assert "gradients differ from one process" in _run(plan, tmp_path, "--check")
