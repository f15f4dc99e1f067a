"""`--compile auto` from profile to run: both ways are measured, the faster one is planned, and a rank follows."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import bapipe as package
from bapipe.costs.fields import COST_FIELDS, CostTable, as_tuples
from bapipe.costs.profile import Profile, read_profile, write_profile
from bapipe.costs.profile_ways import has_both_ways, join_ways, of_way
from bapipe.records.plan import Plan, read_plan
from bapipe.torch.compiling.compiled_layers import CompiledPrograms
from bapipe.torch.profiler.measurement import read_measurement
from bapipe.torch.runtime import rank_engine
from bapipe.torch.runtime.pipeline import Pipeline
from command import bapipe

GRAPHS = functools.partial(CompiledPrograms, backend="graph")
"""no kernels, which take seconds"""
MODEL = """
import torch
from torch import nn

def build():
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*blocks), (torch.rand(4, 16),), {}

def make_batch(seed, size):
    values = torch.rand(size, 16, generator=torch.Generator().manual_seed(seed))
    return values, values.flip(1)

def loss(output, target):
    return nn.functional.mse_loss(output, target)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a small model, and with graphs in place of kernels in this process."""
    (tmp_path / "both_ways_model.py").write_text(MODEL)
    monkeypatch.setenv("BAPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys.modules["bapipe.torch.profiler.profile_module"], "CompiledPrograms", GRAPHS)
    monkeypatch.setattr(rank_engine, "CompiledPrograms", GRAPHS)
    monkeypatch.delitem(sys.modules, "both_ways_model", raising=False)
    return tmp_path


def profiled(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What `bapipe profile` says, which writes profile.json."""
    what = ("both_ways_model:build", "--micro-batch", "2,4", "--iterations", "1", "-o", "profile.json")
    done = bapipe("profile", *words, *what, folder=folder, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    return done


def slowed(profile: Profile, *, compiled: bool) -> Profile:
    """The same where all of one way takes ten times as long as the slower of both, so that no clock decides."""

    def of(table: CostTable, beside: CostTable) -> CostTable:
        seconds = {}
        for name, rule in COST_FIELDS.items():
            known = [np.array(values) for own in (table, beside) if (values := getattr(own, name)) is not None]
            if rule.unit == "seconds" and getattr(table, name) is not None:
                seconds[name] = as_tuples(10 * np.maximum.reduce(known))
        return replace(table, **seconds)

    ways = [of_way(profile, compiled=way) for way in (False, True)]
    fast, slow = ways[not compiled].accelerators, ways[compiled].accelerators
    ways[compiled] = replace(
        ways[compiled], accelerators={name: of(table, fast[name]) for name, table in slow.items()}
    )
    return join_ways(*ways)


def planned(folder: Path, ranks: int, *, slower: bool) -> Plan:
    """By the profile with one way slower."""
    write_profile(slowed(read_profile(folder / "profile.json"), compiled=slower), folder / "slowed.json")
    words = ("--cluster", f"{ranks}xcpu-core", "--global-batch", "8", "--out", "plan.json")
    done = bapipe("plan", "slowed.json", *words, folder=folder)
    assert done.returncode == 0, done.stderr
    return read_plan(folder / "plan.json")


@pytest.mark.usefixtures("alone")
def test_both_ways_are_measured_the_faster_is_planned_and_a_rank_follows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = profiled(folder, "--compile", "auto", "--details", "details.json")
    profile = read_profile(folder / "profile.json")
    assert has_both_ways(profile)
    captured, compiled = (of_way(profile, compiled=way).table("cpu-core") for way in (False, True))
    assert captured.microbatches == compiled.microbatches == (2, 4)
    assert "layers compiled" in compiled.description
    assert "layers compiled" not in captured.description
    for size in (2, 4):
        assert f"compiled, micro-batch {size}: layers take" in done.stdout
    assert "which a run spends once, before its first step" in done.stdout
    details = json.loads((folder / "details.json").read_text())
    for way, value in details.items():
        (folder / f"{way}.json").write_text(json.dumps(value))
        assert read_measurement(folder / f"{way}.json").environment.compiled == (way == "compiled")
    assert details.keys() == {"captured", "compiled"}
    monkeypatch.syspath_prepend(str(folder))
    import both_ways_model

    batch, gradients = both_ways_model.make_batch(1, 8), []
    for slower in (True, False):
        plan = planned(folder, 1, slower=slower)
        assert plan.compiled != slower
        torch.manual_seed(0)
        with Pipeline(both_ways_model.build, plan, functional.mse_loss) as pipe:
            pipe.step(*batch)
            programs = pipe.engine.programs
        assert (programs is None) == slower
        assert programs is None or programs.compiled > 0
        gradients.append([item.grad for item in pipe.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)


def test_a_second_profile_measures_nothing_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiled(folder, "--compile", "auto")
    first = (folder / "profile.json").read_text()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a layer was timed")

    monkeypatch.setattr("bapipe.torch.profiler.measure_loop.time_units", refuse)
    profiled(folder, "--compile", "auto")
    assert (folder / "profile.json").read_text() == first


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["bapipe.torch.profiler.profile_module"], "CompiledPrograms", CompiledPrograms)
    monkeypatch.setattr("bapipe.torch.compiling.inductor_internals.shutil.which", lambda _: None)


def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("no kernel for this")

    monkeypatch.setattr("bapipe.torch.compiling.compiled_layers.compile_layer", refuse)


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [(no_compiler, "--compile needs a C++ compiler"), (no_kernels, "NotImplementedError: no kernel for this")],
)
def test_what_does_not_compile_is_measured_as_captured_and_one_line_says_so(
    breaks: Callable[[pytest.MonkeyPatch], None], reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    done = profiled(folder, "--compile", "auto")
    lines = [line for line in done.stdout.splitlines() if "as captured" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"layers are measured as captured alone: {reason}")
    profile = read_profile(folder / "profile.json")
    assert not has_both_ways(profile)
    assert not profile.compiled


@pytest.mark.parametrize(
    ("words", "compiled", "both"),
    [
        (("--compile",), True, False),
        (("--compile", "yes"), True, False),
        (("--compile=no",), False, False),
        ((), False, False),
        (("--compile=auto",), False, True),
    ],
)
def test_the_option_stands_alone_or_with_a_value(
    words: tuple[str, ...], compiled: bool, both: bool, folder: Path
) -> None:
    profiled(folder, *words)  # alone, the model's name follows it
    profile = read_profile(folder / "profile.json")
    assert (profile.compiled, has_both_ways(profile)) == (compiled, both)


def test_from_python_the_word_is_the_same(folder: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    found = package.profile(model, (torch.rand(2, 4),), micro_batches=(2,), compiled="auto")
    assert has_both_ways(found)
    assert not list(folder.glob("*.json"))


def run(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`bapipe run` of two ranks, in processes of their own."""
    return subprocess.run(
        [sys.executable, "-m", "bapipe", "run", "plan.json", "--steps", "2", "--check"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        timeout=300,
        check=False,
    )


def test_ranks_that_are_started_compile_as_planned(folder: Path) -> None:
    """Where there is no compiler to be found, so that the compiled plan is refused and nothing else is."""
    profiled(folder, "--compile", "auto")
    nothing = {"PATH": str(folder), "CXX": "", "CC": ""}
    assert not planned(folder, 2, slower=True).compiled
    done = run(folder, **nothing)
    assert done.returncode == 0, done.stderr
    assert "gradients differ from one process" in done.stdout
    assert planned(folder, 2, slower=False).compiled
    done = run(folder, **nothing)
    assert done.returncode != 0
    assert "--compile needs a C++ compiler" in done.stderr


@pytest.mark.slow
def test_ranks_train_the_same_by_the_kernels_that_they_compile(folder: Path) -> None:
    profiled(folder, "--compile", "auto")
    assert planned(folder, 2, slower=False).compiled
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert "gradients differ from one process" in done.stdout
