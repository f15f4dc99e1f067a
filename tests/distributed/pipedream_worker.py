"""Ranks that train by PipeDream, each of which counts the versions of its weights.

Usage: pipedream_worker.py FOLDER. The folder holds cases.json, a list of `PipeDreamCase`. The models are captured
first; then the process forks into ranks (see `forked_ranks`). Rank 0 trains by stale updates alone and compares.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import sys
from pathlib import Path
from typing import Any

import torch
from equality_models import SUBJECTS, as_call, build, make_batch
from forked_ranks import run_cases
from pipedream_cases import PipeDreamCase, lag_of, make_plan, read_cases
from torch import Tensor, nn

from bapipe.torch.capturing import Captured, capture
from bapipe.torch.comm.rank_agreement import gathered
from bapipe.torch.inputs.build_model import BuiltModel
from bapipe.torch.pipedream.async_pipeline import PipeDream
from bapipe.torch.verify.gradient_check import Gradients, gradients
from bapipe.torch.verify.stale_check import Holding, compare_stale


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    cases = read_cases(folder / "cases.json")
    captures = {}
    for model, numbers in sorted({(case.model, case.numbers) for case in cases}):
        args, kwargs = as_call(make_batch(model, numbers, 0, 3)[0])
        captures[model, numbers] = capture(build(model, numbers), args, kwargs, check=False)
    return run_cases(
        folder,
        [case.stages for case in cases],
        lambda index: _run_case(cases[index], captures[cases[index].model, cases[index].numbers]),
    )


def make_optimizer(case: PipeDreamCase, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if case.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=1e-3)
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def _run_case(case: PipeDreamCase, captured: Captured) -> dict[str, Any] | None:
    module = copy.deepcopy(captured.module)
    own = dataclasses.replace(captured, module=module)
    plan = make_plan(case, own)
    pipe = PipeDream(own, plan, SUBJECTS[case.model].loss, vertical_sync=case.vertical_sync)
    optimizer = make_optimizer(case, list(pipe.parameters()))
    batches = [make_batch(case.model, case.numbers, step, plan.global_batch) for step in range(case.steps)]
    parts = {name: part for name, _, part in pipe.held() if part is not None}
    alike = _alike(list(pipe.parameters()))
    kept: dict[int, Gradients] = {}
    counted = 0.0

    def on_update(number: int) -> None:
        nonlocal counted
        kept[number] = gradients(pipe.named_parameters())
        counted = max(counted, _memories_of(alike))

    half = case.steps // 2
    traces = [
        pipe.train(iter(batches[:half]), optimizer, steps=half, on_update=on_update),
    ]
    done = half * plan.microbatches
    first, kept = kept, {}
    traces.append(
        pipe.train(iter(batches[half:]), optimizer, steps=case.steps - half, on_update=on_update),
    )
    second = {number + done: found for number, found in kept.items()}
    reports = gathered(
        {
            "gradients": {**first, **second},
            "parts": parts,
            "weights": {name: item.detach().clone() for name, item in pipe.named_parameters()},
            "versions": [trace.weight_versions for trace in traces],
            "counted": counted,
            "live": [trace.peak_in_flight for trace in traces],
            "order": [action for step in sorted(traces[0].events) for action, _, _ in traces[0].events[step]],
            "losses": [loss for trace in traces for loss in trace.losses],
        }
    )
    evaluated = pipe.evaluate(*batches[0])
    pipe.close()
    if not reports:
        return None
    return {**_compare(case, plan.microbatches, batches, reports, half), "evaluated": evaluated}


def _alike(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """The largest weight, and others of its shape."""
    shape = max(parameters, key=Tensor.numel).shape
    return [item for item in parameters if item.shape == shape]


def _memories_of(alike: list[nn.Parameter]) -> float:
    """Memories that hold a version of a weight: its own, and those of leaves of its shape that want a gradient."""
    found = {
        item.data_ptr()
        for item in gc.get_objects()
        if type(item) is Tensor and item.shape == alike[0].shape and item.requires_grad and item.is_leaf
    }
    return len(found | {item.data_ptr() for item in alike}) / len(alike)


def _compare(
    case: PipeDreamCase,
    microbatches: int,
    batches: list[Any],
    reports: list[dict[str, Any]],
    half: int,
) -> dict[str, Any]:
    """The same in one process. The pipeline drains between the halves, so each starts anew from its weights."""
    args, kwargs = as_call(make_batch(case.model, case.numbers, 0, 3)[0])
    built = BuiltModel(
        module=build(case.model, case.numbers),
        args=args,
        kwargs=kwargs,
        loss=SUBJECTS[case.model].loss,
    )
    held: dict[str, list[Holding]] = {}
    for stage, report in enumerate(reports):
        for name in report["weights"]:
            lag = lag_of(case, stage)
            held.setdefault(name, []).append(Holding(lag=lag, part=report["parts"].get(name)))
    optimizer = make_optimizer(case, list(built.module.parameters()))
    worst: list[tuple[float, float, str]] = []
    middle = half * microbatches
    for first, last, some in ((0, middle, batches[:half]), (middle, middle + 10**9, batches[half:])):
        found = {
            number - first: [(report["gradients"][number], report["parts"]) for report in reports]
            for number in reports[0]["gradients"]
            if first <= number < last
        }
        check = compare_stale(
            built,
            some,
            sizes=case.sizes,
            held=held,
            optimizer=optimizer,
            found=found,
            losses=reports[0]["losses"][first:last],
            first=first,
        )
        worst.append((check.gradient_difference, check.loss_difference, check.parameter))
    weights = 0.0
    for report in reports:
        for name, value in report["weights"].items():
            expected = built.module.get_parameter(name).detach()
            part = report["parts"].get(name)
            mine = expected if part is None else expected.narrow(part.dim, part.start, part.size)
            weights = max(weights, float((value - mine).abs().max() / expected.abs().max()))
    return {
        "differences": worst,
        "weights": weights,
        "versions": [report["versions"] for report in reports],
        "counted": [report["counted"] for report in reports],
        "live": [report["live"] for report in reports],
        "order": [report["order"] for report in reports],
        "losses": [report["losses"] == reports[0]["losses"] for report in reports],
        "updates": len(reports[0]["gradients"]),
        "moved": float(sum((item - start).abs().sum() for item, start in _pairs(case, built.module))),
    }


def _pairs(case: PipeDreamCase, module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    before = dict(build(case.model, case.numbers).named_parameters())
    return [(item.detach(), before[name].detach()) for name, item in module.named_parameters()]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
