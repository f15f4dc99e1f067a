"""Ranks that train the advanced cases, each of which compares itself with one process.

Usage: advanced_worker.py FOLDER. The folder holds cases.json. The models are captured first; then the process
forks into ranks (see `forked_ranks`), which train alone what they compare with.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from advanced_cases import AdvancedCase, make_advanced_plan, read_advanced_cases, schedule_of
from equality_watch import Living, watch_graphs
from forked_ranks import run_cases
from torch import Tensor

from bapipe.torch.capturing import Captured, capture
from bapipe.torch.inputs.build_model import BuiltModel
from bapipe.torch.runtime.pipeline import Pipeline
from bapipe.torch.verify.gradient_check import gradients, train_alone
from split_models import SPLIT_MODELS, build_split_model

STEPS = 2


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    cases = read_advanced_cases(folder / "cases.json")
    captures = {}
    for model in sorted({case.model for case in cases}):
        module, args, kwargs = build_split_model(model)
        # Unchecked: autograd must not have run before a fork, and the results are compared with eager anyway.
        captures[model] = capture(module, args, kwargs, check=False)
    worlds = [schedule_of(case).num_ranks for case in cases]
    return run_cases(folder, worlds, lambda index: _run_case(cases[index], captures[cases[index].model]))


@functools.cache
def _alone(
    model: str, sizes: tuple[int, ...]
) -> tuple[list[float], list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Losses, gradients and buffers of each step of one process, without updates."""
    module, args, kwargs = build_split_model(model)
    built = BuiltModel(module=module, args=args, kwargs=kwargs, loss=SPLIT_MODELS[model].loss)
    losses, found, buffers = [], [], []

    def before_update(_: int, loss: float) -> None:
        losses.append(loss)
        found.append(gradients(module.named_parameters()))
        buffers.append({name: item.clone() for name, item in module.named_buffers()})

    batches = [SPLIT_MODELS[model].batch(step, sum(sizes)) for step in range(STEPS)]
    train_alone(built, batches, sizes=sizes, optimizer=None, before_update=before_update)
    return losses, found, buffers


def _run_case(case: AdvancedCase, captured: Captured) -> dict[str, Any]:
    own = replace(captured, module=copy.deepcopy(captured.module))
    plan = make_advanced_plan(case, own)
    pipe = Pipeline(own, plan, SPLIT_MODELS[case.model].loss, engine=case.engine)
    graphs = {stage: Living() for stage in pipe.stages}
    for stage, runner in pipe.engine.runners.items():
        for module in runner._modules.values():
            watch_graphs(module, graphs[stage])
    losses, expected, buffers = _alone(case.model, case.sizes)
    parts = {name: part for name, _, part in pipe.held()}
    found_losses, worst, live = [], (0.0, ""), []
    norms = []
    for step in range(STEPS):
        for parameter in pipe.parameters():
            parameter.grad = None
        found_losses.append(pipe.step(*SPLIT_MODELS[case.model].batch(step, sum(case.sizes))))
        assert pipe.trace is not None
        live.append({str(stage): count for stage, count in pipe.trace.peak_in_flight.items()})
        pairs = [(name, item.grad, expected[step][name]) for name, item in pipe.named_parameters()]
        if max(len(ranks) for ranks in plan.schedule.placement) == 1:
            pairs += [(name, item, buffers[step][name]) for name, item in pipe.named_buffers()]
        scale = max(float(item.abs().max()) for item in expected[step].values()) / 1000
        for name, value, wanted in pairs:
            assert value is not None, name
            part = parts[name]
            mine = wanted if part is None else wanted.narrow(part.dim, part.start, part.size)
            # The gradient of a bias before batch-norm is nought but for rounding.
            largest = max(float(wanted.abs().max()), scale)
            worst = max(worst, (float((value - mine).abs().max()) / largest, f"{name}, step {step}"))
        norms.append((pipe.clip_grad_norm_(1e9), _norm(expected[step])))
    evaluated = pipe.evaluate(*SPLIT_MODELS[case.model].batch(0, sum(case.sizes)))
    pipe.close()
    return {
        "losses": list(zip(found_losses, losses, strict=True)),
        "worst": worst,
        "norms": norms,
        "evaluated": evaluated,
        "live": live,
        "graphs": {str(stage): item.peak for stage, item in graphs.items()},
        "left": sum(item.now for item in graphs.values()),
        "held": {name: None if part is None else (part.start, part.size, part.of) for name, part in parts.items()},
        "names": [name for name, _ in own.module.named_parameters()],
        "hashes": {
            f"{name} {parts[name]}": hashlib.blake2b(item.grad.contiguous().numpy().tobytes()).hexdigest()
            for name, item in pipe.named_parameters()
            if item.grad is not None
        },
    }


def _norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.stack([item.square().sum() for item in gradients.values()]).sum().sqrt())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
