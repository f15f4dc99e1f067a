"""Ranks that train in one precision each, and compare with plain torch in one process.

Usage: precision_worker.py FOLDER. The reference is the module itself in eager, forwards under torch.autocast and
backwards outside of it, in the micro-batches of the plan; nothing of BaPipe is in it. Every rank leaves
result-<case>-<rank>.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from forked_ranks import run_cases
from run_plans import ROOT, SMALL, make_plan
from torch import Tensor, nn
from torch.nn import functional

from bapipe.errors import BaPipeError
from bapipe.hardware.precision import find_precision
from bapipe.models.layers import ModelRef
from bapipe.records.plan import Plan
from bapipe.schedule.generators import capped, make_schedule, with_recompute, with_update
from bapipe.schedule.schedule_file import ScheduleFile
from bapipe.torch.checkpoint.checkpoints import Checkpoints
from bapipe.torch.inputs.make_optimizer import make_optimizer
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.launch.train import train
from bapipe.torch.runtime.pipeline import Pipeline
from bapipe.torch.runtime.plan_checks import check_plan

sys.path.insert(0, str(ROOT))
from examples import tiny_model

WIDTH, SIZE, COUNT = 24, 4, 4
MASTERS = "adam(master_weights=true)"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MODEL = ModelRef(name="tiny", ref="examples.tiny_model:build", args={"hidden": WIDTH, "layers": len(SMALL)})


def build() -> Any:
    return tiny_model.build(hidden=WIDTH, layers=len(SMALL))


def plan_of(schedule: str, precision: str, *, recompute: bool = False, optimizer: str = "sgd") -> Plan:
    orders = make_schedule(schedule, 2, COUNT)
    if recompute:
        orders = with_recompute(orders, [0, 1])
    plan = make_plan(
        orders,
        microbatches=COUNT,
        microbatch_size=SIZE,
        model=MODEL,
        layers=SMALL,
        dtype=precision,
        optimizer=optimizer,
    )
    return replace(plan, stages=tuple(replace(stage, recompute=recompute) for stage in plan.stages))


def replicated(precision: str) -> Plan:
    """Data parallelism over two ranks."""
    plan = plan_of("gpipe", precision)
    names = tuple(name for stage in plan.stages for name in stage.accelerators)
    stage = replace(plan.stages[0], accelerators=names, last_layer=len(SMALL) - 1, layers=SMALL)
    orders = with_update(capped(1, COUNT, [2], name="data-parallel", replicas=[2]))
    return replace(plan, kind="data-parallel", stages=(stage,), schedule=ScheduleFile.of(orders))


def batch(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = tiny_model.make_batch(step + 1, SIZE * COUNT)
    return inputs.float(), targets


def alone(module: nn.Module, step: int, dtype: torch.dtype, scale: float = 1.0) -> float:
    """Gradients of a global batch into the module's parameters; its loss."""
    inputs, targets = batch(step)
    total = 0.0
    with torch.autocast("cpu", dtype, enabled=False):  # casts of weights are kept to its end
        for part, target in zip(inputs.split(SIZE), targets.split(SIZE), strict=True):
            with torch.autocast("cpu", dtype):
                loss = functional.cross_entropy(module(part), target) * (1 / COUNT)
            (loss * scale).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    return total


def difference(pipe: Pipeline, module: nn.Module) -> float:
    """Largest of this rank's gradients from the module's, relative to the module's largest."""
    wanted = dict(module.named_parameters())
    worst = 0.0
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None, name
        expected = wanted[name].grad
        assert expected is not None
        assert parameter.grad.dtype == parameter.dtype
        worst = max(worst, float((parameter.grad - expected).abs().max() / expected.abs().max()))
    return worst


def mixed(plan: Plan) -> dict[str, Any]:
    """Two steps, with an optimizer step between them."""
    pipe = Pipeline(build, plan, tiny_model.loss)
    torch.manual_seed(0)
    module = build()[0]
    dtype = DTYPES[plan.dtype.partition("-")[0]]
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.1) for item in (pipe, module)]  # type: ignore[attr-defined]
    found: dict[str, Any] = {"differences": [], "losses": []}
    for step in range(2):
        found["losses"].append((pipe.step(*batch(step)), alone(module, step, dtype)))
        found["differences"].append(difference(pipe, module))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found["weights"] = sorted({str(item.dtype) for item in pipe.parameters()})
    if len(plan.stages) > 1:
        found["sent"] = str(pipe.engine.own.message(0, SIZE, True)[0].dtype)
    found["evaluated"] = pipe.evaluate(*batch(0))
    found["autocast"] = torch.is_autocast_enabled("cpu")
    pipe.close()
    return found


def overflow(plan: Plan) -> dict[str, Any]:
    """A step that overflows everywhere, one that does on rank 0 alone, and one that does not."""
    pipe = Pipeline(build, plan, tiny_model.loss)
    torch.manual_seed(0)
    module = build()[0]
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    found: dict[str, Any] = {"skipped": [], "scales": [], "changed": []}
    try:
        pipe.step(*batch(0))
    except BaPipeError as error:
        found["refused"] = str(error)
    scaler = pipe.grad_scaler(init_scale=2.0**60, backoff_factor=2.0**-25, growth_interval=2)
    for step in range(4):
        before = [item.detach().clone() for item in pipe.parameters()]
        optimizer.zero_grad()
        scale = scaler.get_scale()
        pipe.step(*batch(step), scaler=scaler)
        if step == 1 and pipe.rank == 0:
            next(pipe.parameters()).grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
        if step == 2:
            module.zero_grad()
            alone(module, step, torch.float16, scale)
            norm = sum(
                float(item.grad.double().square().sum()) for item in module.parameters() if item.grad is not None
            )
            found["norms"] = (pipe.clip_grad_norm_(1e9), norm**0.5 / scale)
            found["difference"] = difference(pipe, module)
            scaler.unscale_(optimizer)
            found["norms"] = (*found["norms"], pipe.clip_grad_norm_(1e9))
        scaler.step(optimizer)
        scaler.update()
        found["skipped"].append(scaler.skipped)
        found["scales"].append(scaler.get_scale())
        found["changed"].append(any(not torch.equal(a, b) for a, b in zip(before, pipe.parameters(), strict=True)))
    pipe.close()
    return found


def masters(plan: Plan, folder: Path) -> dict[str, Any]:
    """Training that is saved and goes on in another Pipeline is that which was not interrupted."""

    def start() -> tuple[Pipeline, torch.optim.Optimizer]:
        module, args, kwargs = build()
        pipe = Pipeline(
            lambda: (module.bfloat16(), tuple(item.bfloat16() for item in args), kwargs), plan, tiny_model.loss
        )
        optimizer = make_optimizer(plan.optimizer, list(pipe.parameters()), rate=1e-3)
        assert optimizer is not None
        return pipe, optimizer

    def steps(pipe: Pipeline, optimizer: torch.optim.Optimizer, some: range) -> None:
        for step in some:
            optimizer.zero_grad()
            inputs, targets = batch(step)
            pipe.step(inputs.bfloat16(), targets)
            optimizer.step()

    torch.manual_seed(0)
    pipe, optimizer = start()
    steps(pipe, optimizer, range(2))
    checkpoints = Checkpoints(pipe, folder, optimizer=optimizer)
    checkpoints.save()
    checkpoints.close()
    steps(pipe, optimizer, range(2, 4))
    torch.manual_seed(1)
    other, resumed = start()
    again = Checkpoints(other, folder, optimizer=resumed)
    again.load()
    steps(other, resumed, range(2, 4))
    again.close()
    same = [
        torch.equal(resumed.state[own]["master"], optimizer.state[item]["master"]) and torch.equal(own, item)
        for own, item in zip(other.parameters(), pipe.parameters(), strict=True)
    ]
    dtypes = {str(value.dtype) for state in resumed.state.values() for value in state.values()}
    for item in (pipe, other):
        item.close()
    return {"same": all(same), "dtypes": sorted(dtypes)}


def checked(plan: Plan, folder: Path) -> dict[str, Any]:
    """`bapipe run --check`, and a run that goes on from its checkpoint."""
    from bapipe.torch.checkpoint.checkpoint_options import Saving

    options = RunOptions(steps=2, check=True, trace=False, saving=Saving(folder=folder))
    record = train(check_plan(plan), options, folders=(ROOT,))
    more = replace(options, steps=3, check=False, saving=Saving(folder=folder, resume=True))
    resumed = train(check_plan(plan), more, folders=(ROOT,))
    if record is None or resumed is None:
        return {}
    assert record.check is not None
    return {
        "difference": record.check.gradient_difference,
        "loss_difference": record.check.loss_difference,
        "tolerance": record.check.tolerance,
        "compared": record.check.compared,
        "passed": record.check.passed,
        "steps": len(resumed.steps),
    }


def cases(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """By name; each on two ranks."""
    return {
        "1f1b": lambda: mixed(plan_of("1f1b-so", "bf16-mixed")),
        "recompute": lambda: mixed(plan_of("1f1b-sno", "bf16-mixed", recompute=True)),
        "zero-bubble": lambda: mixed(plan_of("zb-h1", "bf16-mixed")),
        "data-parallel": lambda: mixed(replicated("bf16-mixed")),
        "overflow": lambda: overflow(plan_of("1f1b-so", "fp16-mixed")),
        "masters": lambda: masters(plan_of("1f1b-so", "bf16", optimizer=MASTERS), folder / "m"),
        "run mixed": lambda: checked(plan_of("1f1b-so", "bf16-mixed", optimizer="adam"), folder / "a"),
        "run fp16": lambda: checked(plan_of("1f1b-so", "fp16-mixed"), folder / "b"),
        "run masters": lambda: checked(plan_of("gpipe", "bf16", optimizer=MASTERS), folder / "c"),
    }


def main() -> int:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    assert find_precision("fp16-mixed").scaled
    found = list(cases(folder).values())
    return run_cases(folder, [2] * len(found), lambda index: found[index]())


if __name__ == "__main__":
    sys.exit(main())
