"""`--compile` from the profile to the run: what is measured, what a plan says, and what a rank does."""

from __future__ import annotations

import functools
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.costs.profile import Profile, read_profile, write_profile
from bapipe.costs.profile_merge import merge_profiles
from bapipe.errors import BaPipeError
from bapipe.models.layers import ModelRef
from bapipe.records.plan import read_plan
from bapipe.torch.compiling.compiled_layers import CompiledPrograms
from bapipe.torch.profiler import MeasureSettings, profile_module
from bapipe.torch.runtime import rank_engine
from bapipe.torch.runtime.pipeline import Pipeline
from command import bapipe, refused
from compiled_models import Pair
from one_rank_plan import build, one_rank
from paths import REPOSITORY

GRAPHS = functools.partial(CompiledPrograms, backend="graph")
"""no kernels, which take seconds"""


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Profile, Profile]:
    """Of one model, as captured and compiled."""
    file = sys.modules["bapipe.torch.profiler.profile_module"]  # the package has a function of that name
    monkeypatch.setattr(file, "CompiledPrograms", GRAPHS)
    settings = MeasureSettings(microbatches=(4,), folder=tmp_path, seconds=0.001, iterations=1)
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        profiled = profile_module(
            Pair(),
            (torch.randn(4, 16),),
            model=ModelRef(name="pair"),
            settings=settings,
            accelerator="cpu-core",
            compile_=compiled,
        )
        found.append(profiled.profile)
    return found[0], found[1]


def test_a_compiled_profile_says_so_and_gives_compiled_plans(
    profiles: tuple[Profile, Profile], tmp_path: Path
) -> None:
    captured, compiled = profiles
    assert (captured.compiled, compiled.compiled) == (False, True)
    (own,), (other,) = captured.accelerators.values(), compiled.accelerators.values()
    assert "layers compiled" in other.description
    assert "layers compiled" not in own.description
    assert other.delayed is not None
    assert all(held > 0 for held in other.delayed[0])
    # The compiled backward computes again what is cheap.
    assert sum(other.saved_activations[0]) <= sum(own.saved_activations[0])
    with pytest.raises(BaPipeError, match="one of pair and pair was measured compiled"):
        merge_profiles([captured, compiled])
    write_profile(compiled, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == compiled
    words = ("--cluster", "2xcpu-core", "--micro-batch", "4", "--out", "plan.json")
    done = bapipe("plan", "profile.json", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_plan(tmp_path / "plan.json").compiled


def test_a_plan_may_be_compiled_though_its_profile_is_not(tmp_path: Path) -> None:
    for words in ((), ("--compile",)):
        path = tmp_path / f"plan{len(words)}.json"
        done = bapipe("plan", "vgg16", "--cluster", "2xv100", *words, "--out", str(path))
        assert done.returncode == 0, done.stderr
        plan = read_plan(path)
        assert plan.compiled == bool(words)
        assert any("profile with --compile" in note for note in plan.notes) == bool(words)


def test_a_plan_from_before_is_not_compiled() -> None:
    path = REPOSITORY / "examples" / "plan.json"
    assert '"compiled"' not in path.read_text()
    assert not read_plan(path).compiled


def test_without_a_compiler_a_profile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapipe.torch.compiling.inductor_internals.shutil.which", lambda _: None)
    line = refused("profile", "gpt", "--arg", "blocks=1", "--compile", "--micro-batch", "2")
    assert "--compile needs a C++ compiler" in line


@pytest.mark.usefixtures("alone")
def test_a_rank_follows_its_plan_unless_it_is_overridden(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_engine, "CompiledPrograms", GRAPHS)
    torch.manual_seed(1)
    inputs, targets = torch.rand(8, 6).double(), torch.rand(8, 4).double()
    found = {}
    for planned, asked in ((False, None), (True, None), (True, False), (False, True)):
        with (
            caplog.at_level(logging.INFO, logger="bapipe"),
            Pipeline(build, one_rank(compiled=planned), functional.mse_loss, compile=asked) as pipe,
        ):
            loss = pipe.step(inputs, targets)
            programs = pipe.engine.programs
        expected = 3 if (planned if asked is None else asked) else 0  # two layers and the loss
        assert (0 if programs is None else programs.compiled) == expected
        found[planned, asked] = loss, [item.grad for item in pipe.parameters()]
    assert "rank 0 is compiling its layers" in caplog.text
    loss, gradients = found[False, None]
    for other, others in found.values():
        assert other == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(others, gradients, rtol=1e-12, atol=1e-15)


@pytest.mark.usefixtures("alone")
def test_a_rank_that_compiles_nothing_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("no kernel for this")

    monkeypatch.setattr(rank_engine, "CompiledPrograms", GRAPHS)
    monkeypatch.setattr("bapipe.torch.compiling.compiled_layers.compile_layer", refuse)
    with Pipeline(build, one_rank(compiled=True), functional.mse_loss):
        pass
    assert "rank 0 compiles no layer and runs all as captured: NotImplementedError: no kernel" in caplog.text


@pytest.mark.usefixtures("alone")
def test_under_autocast_the_casts_are_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_engine, "CompiledPrograms", GRAPHS)
    torch.manual_seed(1)
    inputs, targets = torch.rand(8, 6), torch.rand(8, 4)

    def single() -> tuple[nn.Module, tuple[Tensor], dict[str, object]]:
        return build()[0].float(), (torch.rand(4, 6),), {}

    found = []
    for compiled in (False, True):
        plan = replace(one_rank(compiled=compiled), dtype="fp32")
        with Pipeline(single, plan, functional.mse_loss, autocast=torch.bfloat16) as pipe:
            losses = [pipe.step(inputs, targets) for _ in range(2)]
            assert pipe.engine.programs is None or not pipe.engine.programs.failed
        found.append((losses, [item.grad for item in pipe.parameters()]))
    (losses, gradients), (ours, compiled_gradients) = found
    assert ours == pytest.approx(losses, rel=1e-6)
    assert all(item is not None and item.dtype == torch.float32 for item in compiled_gradients)
    torch.testing.assert_close(compiled_gradients, gradients, rtol=1e-5, atol=1e-6)
