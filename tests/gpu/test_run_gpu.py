"""Plans trained by two ranks that share a GPU, checked against one process: kernels differ from a CPU's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bapipe.costs.profile import Profile
from bapipe.hardware.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.planner import Request, explore, make_plan
from bapipe.records.plan import Plan, write_plan
from bapipe.torch.device.h2d_copy import Upload
from bapipe.torch.profiler import MeasureSettings, profile_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]

MODELS: dict[str, dict[str, int | float | str | bool]] = {
    "gnmt-4": {"hidden": 64, "vocabulary": 512, "sequence": 12, "with_loss": True},
    "vgg16": {"image": 32, "width": 8, "hidden": 64, "classes": 10, "with_loss": True},
}
TYPE = "small-gpu"
CLUSTER = Cluster(
    name="two of one",
    accelerators=tuple(Accelerator(name=f"localhost/{i}", type=TYPE, node="localhost") for i in range(2)),
    types={
        TYPE: AcceleratorType(
            name=TYPE, kind="gpu", flops={"fp32": 1e13}, memory=8e9, memory_bandwidth=1e12, execution="synchronous"
        )
    },
    within=Link(bandwidth=1e10, latency=1e-5),
)


@pytest.fixture(scope="module", params=sorted(MODELS))
def profile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Of a small model, with every layer as costly as the next and dividing it free: then halves of layers balance
    two stages."""
    found = profile_model(
        request.param,
        settings=MeasureSettings(microbatches=(4,), folder=tmp_path_factory.mktemp("cache"), seconds=0.01),
        device="cuda",
        precision="fp64",
        args=MODELS[request.param],
    ).profile
    (table,) = found.accelerators.values()
    ones, halves = (((cost,) * len(found.layers),) for cost in (1e-3, 5e-4))
    costs = replace(table, forward=ones, backward=ones, weight_gradient=halves, parting=None)
    costs = replace(costs, part_forward=None, part_backward=None)
    return replace(found, accelerators={TYPE: costs})


def trained(plan: Plan, folder: Path) -> list[dict[str, object]]:
    """What the run said, a JSON object a line."""
    write_plan(plan, folder / "plan.json")
    command = [
        sys.executable,
        "-m",
        "bapipe",
        "run",
        str(folder / "plan.json"),
        "--steps",
        "2",
        "--check",
        "--json",
    ]
    done = subprocess.run(
        [*command, "--device", "cuda", "--timeout", "60"],
        capture_output=True,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("schedule", ["1f1b-so", "gpipe", "zb-h1", "data-parallel", "pipedream"])
def test_a_plan_trains_as_one_process_does(profile: Profile, schedule: str, tmp_path: Path) -> None:
    stages = None if schedule == "data-parallel" else 2
    request = Request(global_batch=16, microbatch=4, schedule=schedule, stages=stages)
    told = trained(make_plan(explore(profile, CLUSTER, request)), tmp_path)
    assert any("check" in line for line in told), told


@pytest.mark.parametrize("schedule", ["1f1b-so", "zb-h1"])
def test_a_plan_with_a_divided_layer_trains_as_one_process_does(
    profile: Profile, schedule: str, tmp_path: Path
) -> None:
    request = Request(global_batch=16, microbatch=4, schedule=schedule, stages=2, split_layers=True)
    uneven = profile.accelerators[TYPE]
    (forward,) = uneven.forward
    middle = len(forward) // 2
    heavy = (tuple(1e-2 if index == middle else cost for index, cost in enumerate(forward)),)
    costly = replace(profile, accelerators={TYPE: replace(uneven, forward=heavy, backward=heavy)})
    plan = make_plan(explore(costly, CLUSTER, request))
    assert any(stage.fractions for stage in plan.stages), "nothing is divided, so nothing is tested"
    trained(plan, tmp_path)


def test_an_input_is_copied_beside_what_is_queued() -> None:
    device = torch.device("cuda", 0)
    upload = Upload(device)
    value = torch.randn(1 << 20)
    assert torch.equal(upload(value).cpu(), value)  # whatever is allocated at first is there now
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    queued = torch.cuda.Event()
    queued.record()
    here = upload(value)
    assert not queued.query(), "the copy waited for what was queued before it"
    after = here * 2
    assert torch.equal(after.cpu(), value * 2)
    assert upload(here) is here


def test_the_first_matrix_product_of_a_backward_has_a_cuda_context() -> None:
    """Autograd's threads are started by a backward on the CPU, before CUDA is in use: cuBLAS would warn."""
    code = (
        "import torch\n"
        "from bapipe.torch.device.take_device import take_device\n"
        "torch.ones(1, requires_grad=True).sum().backward()\n"
        "take_device(torch.device('cuda', 0))\n"
        "torch.nn.Linear(8, 8, device='cuda')(torch.ones(2, 8, device='cuda')).sum().backward()\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
