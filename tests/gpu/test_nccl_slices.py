"""NCCL between slices of one GPU, which is what ranks with a GPU each use: plans train as one process does, and a
rank that is lost is named."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bapipe.costs.profile import Profile
from bapipe.hardware.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.planner import Request, explore, make_plan
from bapipe.records.plan import Plan, write_plan
from bapipe.torch import slices
from bapipe.torch.profiler import MeasureSettings, profile_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
    pytest.mark.skipif(shutil.which("nvidia-cuda-mps-control") is None, reason="needs CUDA MPS"),
]

RANKS = 4
TYPE = "small-gpu-25pct"
CLUSTER = Cluster(
    name="four slices",
    accelerators=tuple(Accelerator(name=f"localhost/{i}", type=TYPE, node="localhost") for i in range(RANKS)),
    types={
        TYPE: AcceleratorType(
            name=TYPE, kind="gpu", flops={"fp32": 1e13}, memory=8e9, memory_bandwidth=1e12, execution="synchronous"
        )
    },
    within=Link(bandwidth=1e10, latency=1e-5),
)
PLANS = {
    "straight": Request(global_batch=16, microbatch=2, schedule="1f1b-so", stages=RANKS),
    "zero-bubble": Request(global_batch=16, microbatch=2, schedule="zb-h1", stages=RANKS),
    "interleaved": Request(global_batch=16, microbatch=2, schedule="interleaved"),
    "data parallel": Request(global_batch=16, microbatch=2, schedule="data-parallel", engines=False),
    "pipedream": Request(global_batch=16, microbatch=2, schedule="pipedream", stages=RANKS),
}


@pytest.fixture(scope="module", autouse=True)
def four_slices() -> Iterator[None]:
    before = slices.status(0)
    slices.start(slices.even_slices(RANKS), memory=16e9)
    yield
    if before is None:
        slices.stop(0)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Of a small model in which every layer is as costly as the next."""
    found = profile_model(
        "gnmt-8",
        settings=MeasureSettings(microbatches=(2,), folder=tmp_path_factory.mktemp("cache"), seconds=0.01),
        device="cpu",
        precision="fp64",
        args={"hidden": 64, "vocabulary": 512, "sequence": 12, "with_loss": True},
    ).profile
    (table,) = found.accelerators.values()
    ones, halves = (((cost,) * len(found.layers),) for cost in (1e-3, 5e-4))
    costs = replace(table, forward=ones, backward=ones, weight_gradient=halves)
    return replace(found, accelerators={TYPE: costs})


def command(plan: Plan, folder: Path, steps: int, *options: str) -> list[str]:
    write_plan(plan, folder / "plan.json")
    run = [sys.executable, "-m", "bapipe", "run", str(folder / "plan.json"), "--steps", str(steps)]
    return [*run, "--transport", "nccl", "--device", "cuda", "--timeout", "20", *options]


@pytest.mark.parametrize("kind", sorted(PLANS))
def test_a_plan_trains_over_nccl_as_one_process_does(profile: Profile, kind: str, tmp_path: Path) -> None:
    plan = make_plan(explore(profile, CLUSTER, PLANS[kind]))
    check_run(plan, tmp_path)


def test_a_plan_with_replicas_trains_over_nccl_as_one_process_does(profile: Profile, tmp_path: Path) -> None:
    """Two stages of two replicas each: messages cross by NCCL and sums too."""
    plan = make_plan(explore(profile, CLUSTER, Request(global_batch=16, microbatch=2, schedule="1f1b-so")))
    assert any(len(stage.accelerators) > 1 for stage in plan.stages), "no stage has replicas"
    check_run(plan, tmp_path)


def check_run(plan: Plan, folder: Path) -> None:
    done = subprocess.run(
        command(plan, folder, 2, "--check", "--json"), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert any("check" in line for line in lines), lines


@pytest.mark.parametrize("kind", ["straight", "data parallel"])
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named(profile: Profile, kind: str, by: signal.Signals, tmp_path: Path) -> None:
    plan = make_plan(explore(profile, CLUSTER, PLANS[kind]))
    process = subprocess.Popen(
        command(plan, tmp_path, 100000, "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        while line and json.loads(line).get("step", 0) < 3:
            line = process.stdout.readline()
        assert line, process.communicate()[1][-2000:]
        lost = 2
        os.kill(worker(str(tmp_path / "plan.json"), lost), by)
        begun = time.monotonic()
        error = process.communicate(timeout=90)[1]
        assert process.returncode == 1, error[-2000:]
        lines = [text for text in error.splitlines() if not text.startswith("rank 0: ")]  # a warning of its loss
        line, *table = (text for text in lines if "is ready" not in text)
        reason = "was killed by SIGKILL" if by == signal.SIGKILL else "does not answer"
        assert re.match(rf"bapipe: rank {lost} on .*: {reason}", line), error
        # What every rank was at follows where one did not answer.
        assert len(table) == (0 if by == signal.SIGKILL else 1 + RANKS), error
        assert time.monotonic() - begun < 60
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def worker(plan: str, rank: int) -> int:
    """The process of a rank of that plan's run."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"bapipe.torch.launch.worker" in words and plan.encode() in words:
                environment = (folder / "environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in environment:
                    return int(folder.name)
        except OSError:
            continue
    raise AssertionError(f"rank {rank} does not run")
