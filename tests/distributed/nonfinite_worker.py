"""Two ranks whose losses and gradients stop being finite. Usage: nonfinite_worker.py FOLDER.

Leaves FOLDER/result-<case>-<rank>.json: what was reported, as a list, and what was logged.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from checkpoint_plans import Leg, cut_plan
from forked_ranks import run_cases
from nonfinite_cases import CASES, NAMES
from torch import Tensor, nn

from bapipe.records.plan import Plan
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import make_schedule
from bapipe.torch.capturing import Captured, capture
from bapipe.torch.health.divergence import EVERY, Diverging
from bapipe.torch.pipedream.async_pipeline import PipeDream
from bapipe.torch.runtime.nonfinite import NonFinite
from bapipe.torch.runtime.pipeline import Pipeline

WIDTH, SIZE, STEPS = 4, 4, 4


class Layer(nn.Module):
    """Its output is infinite where `scale` is 0, the gradient of `root` is not finite where that is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.scale, self.root = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        masked = x.masked_fill(x < x.amax(-1, keepdim=True), float("-inf")).softmax(-1)  # as attention has it
        return self.norm(x) + self.linear(masked) / self.scale * (1 + self.root.sqrt())


def main(folder: Path) -> int:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = nn.Sequential(*(Layer() for _ in range(4)))
    captured = capture(module, (torch.rand(2, WIDTH),), check=False)
    return run_cases(folder, [2] * len(CASES), lambda index: run_case(captured, index))


def run_case(captured: Captured, index: int) -> dict[str, Any]:
    special = {"pipedream": run_pipedream, "diverging": run_diverging}
    return special.get(NAMES[index], run)(captured, CASES[index])


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean() + torch.log(1 - target).mean()


def run_pipedream(captured: Captured, case: dict[str, Any]) -> dict[str, Any]:
    """As `run`, without a pause between global batches."""
    own = dataclasses.replace(captured, module=copy.deepcopy(captured.module))
    found: list[NonFinite] = []
    plan = plan_of(own, make_schedule("pipedream", 2, 2))
    with PipeDream(own, plan, loss, seed=None, on_nonfinite=found.append) as pipe:
        zero = dict(pipe.named_parameters()).get(case["zero"])

        def update(number: int) -> None:
            if number == 1 and zero is not None:
                zero.data.zero_()

        generator = torch.Generator().manual_seed(0)
        batches = [
            (torch.rand(2 * SIZE, WIDTH, generator=generator), torch.zeros(2 * SIZE, WIDTH)) for _ in range(STEPS)
        ]
        pipe.train(batches, torch.optim.SGD(pipe.parameters(), lr=0.01), steps=STEPS, on_update=update)
    return {"found": [dataclasses.asdict(item) for item in found], "lines": [item.line for item in found]}


def run_diverging(captured: Captured, _: dict[str, Any]) -> dict[str, Any]:
    """From one step on targets are so far off that the gradients of the last stage become large; all is finite."""
    own = dataclasses.replace(captured, module=copy.deepcopy(captured.module))
    found: list[Diverging] = []
    bad: list[NonFinite] = []
    plan = plan_of(own, make_schedule("1f1b-so", 2, 2))
    with Pipeline(own, plan, loss, seed=None, on_nonfinite=bad.append, on_divergence=found.append) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-9)
        for step in range(5 * EVERY):
            targets = torch.zeros(2 * SIZE, WIDTH) - (1e5 if step > 4 * EVERY else 0.0)
            pipe.step(torch.rand(2 * SIZE, WIDTH, generator=torch.Generator().manual_seed(step)), targets)
            optimizer.step()
            optimizer.zero_grad()
    return {"found": [dataclasses.asdict(item) for item in found], "lines": [item.line for item in (*bad, *found)]}


def plan_of(captured: Captured, schedule: Schedule) -> Plan:
    names = [layer.name for layer in captured.layers]
    half = next(name for name in reversed(names) if name.startswith("1"))
    leg = Leg(name="two", schedule=schedule, cuts=((half, None),))
    plan = cut_plan(leg, names, [None] * len(names), size=SIZE, fingerprint=captured.fingerprint)
    return dataclasses.replace(plan, dtype="fp32")


def run(captured: Captured, case: dict[str, Any]) -> dict[str, Any]:
    """Train; before one of the steps a parameter becomes 0."""
    own = dataclasses.replace(captured, module=copy.deepcopy(captured.module))
    plan = plan_of(own, make_schedule("1f1b-so", 2, 2))
    found: list[NonFinite] = []
    handler = Lines()
    logging.getLogger("bapipe").addHandler(handler)
    with Pipeline(own, plan, loss, seed=None, on_nonfinite=None if case["logs"] else found.append) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
        scaler = pipe.grad_scaler(init_scale=4.0) if case["scaler"] else None
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            targets = torch.zeros(2 * SIZE, WIDTH)
            if case["zero"] == "target" and step >= 1:
                targets += 1
            for name, parameter in pipe.named_parameters():
                if name == case["zero"] and step == 1:
                    parameter.data.zero_()
            pipe.step(torch.rand(2 * SIZE, WIDTH, generator=generator), targets, scaler=scaler)
            if case["clips"]:
                pipe.clip_grad_norm_(1.0)
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        counts = {int(value) for name, value in pipe.named_buffers() if name.endswith("num_batches_tracked")}
    logging.getLogger("bapipe").removeHandler(handler)
    return {
        "found": [dataclasses.asdict(item) for item in found],
        "lines": [item.line for item in found] + handler.lines,
        "batches": sorted(counts),
    }


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
