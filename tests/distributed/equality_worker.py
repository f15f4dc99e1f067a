"""A few processes that train many cases, each of which captures every model once.

Usage: equality_worker.py FOLDER. The folder holds cases.json. The models are captured first; then the process
forks into four ranks, which share the work of training alone and run the cases, those of fewer ranks by the first
ones.
Every rank leaves result-<case>-<rank>.json: how far it is from one process, and what it held. A case that fails
leaves its error and does not stop the others.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from equality_alone import Alone, Share, make_optimizer, train_alone
from equality_models import SUBJECTS, as_call, build, make_batch
from equality_plans import Case, make_plan, make_schedule_of, read_cases
from equality_watch import Living, boundary_tensors, count_tensors, watch_graphs
from forked_ranks import TIMEOUT, fork_ranks, run_own_cases
from torch import Tensor

from bapipe.records.plan import Plan
from bapipe.torch.capturing import Captured, Result, capture, largest_difference
from bapipe.torch.runtime.pipeline import Pipeline

RANKS = 4


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    cases = read_cases(folder / "cases.json")
    captures = {}
    for model, numbers in sorted({case.captured for case in cases}):
        args, kwargs = as_call(make_batch(model, numbers, 0, 3)[0])
        # Unchecked: autograd must not have run before a fork, and the results are compared with eager anyway.
        captures[model, numbers] = capture(build(model, numbers), args, kwargs, check=False)
    return fork_ranks(RANKS, lambda rank: run_rank(folder, rank, cases, captures))


def run_rank(folder: Path, rank: int, cases: list[Case], captures: Mapping[tuple[str, str], Captured]) -> None:
    shares: dict[tuple[object, ...], set[Share]] = {}
    for case in cases:
        schedule = make_schedule_of(case)
        shares.setdefault(case.alone, set()).update(
            (index, len(ranks), schedule.dealing_of(stage))
            for stage, ranks in enumerate(schedule.placement)
            for index in range(len(ranks))
        )
    by_key = {case.alone: case for case in cases}
    for index, (key, case) in enumerate(by_key.items()):
        if index % RANKS == rank:
            found = train_alone(case, captures[case.captured], shares=sorted(shares[key]))
            torch.save(found, _alone_path(folder, key))
    _join(folder / "store-all", rank, RANKS)
    dist.barrier()
    dist.destroy_process_group()

    @functools.lru_cache(maxsize=64)
    def alone(key: tuple[object, ...]) -> Alone:
        return torch.load(_alone_path(folder, key), weights_only=False)  # type: ignore[no-any-return]

    def run(index: int) -> dict[str, Any]:
        case = cases[index]
        return run_case(case, captures[case.captured], alone(case.alone))

    run_own_cases(folder, rank, [make_schedule_of(case).num_ranks for case in cases], run)


def _alone_path(folder: Path, key: tuple[object, ...]) -> Path:
    return folder / f"alone-{hashlib.blake2b(str(key).encode(), digest_size=8).hexdigest()}.pt"


def _join(store: Path, rank: int, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=TIMEOUT)


def run_case(case: Case, captured: Captured, alone: Alone) -> dict[str, Any]:
    """Train, compare, and count; collective over the case's ranks."""
    own = dataclasses.replace(captured, module=copy.deepcopy(captured.module))
    plan = make_plan(case, [layer.name for layer in own.layers], fingerprint=own.fingerprint)
    pipe = Pipeline(own, plan, SUBJECTS[case.model].loss, engine=case.engine)
    needs_data = any(_roots(own, plan, stage) for stage in pipe.stages)
    is_last = len(plan.stages) - 1 in pipe.stages
    graphs = {stage: Living() for stage in pipe.stages}
    for stage, runner in pipe.engine.runners.items():
        for module in runner._modules.values():
            watch_graphs(module, graphs[stage])
    received, sent = Living(), Living()
    optimizer = None if case.training == "accumulate" else make_optimizer(case.training, pipe.parameters())
    differences, losses, evaluated, live, left, tensors = [], [], [], [], [], []
    gradients: list[Tensor] = []
    gc.collect()
    gc.disable()  # what a step leaves behind must go without it
    # torch's engine checks that what it sends with is torch's own
    with boundary_tensors(received, sent) if case.engine == "bapipe" else contextlib.nullcontext():
        tensors.append(count_tensors())
        for step in range(case.steps):
            inputs, targets = make_batch(case.model, case.numbers, step, sum(case.sizes))
            if case.data == "needed":
                inputs, targets = inputs if needs_data else None, targets if is_last else None
            losses.append(pipe.step(inputs, targets))
            assert pipe.trace is not None
            live.append(pipe.trace.peak_in_flight)
            if case.evaluate:
                evaluated.append(pipe.evaluate(inputs, targets))
            del inputs, targets
            left.append(sum(item.now for item in (*graphs.values(), received, sent)))
            if optimizer is None:
                gradients = [item.grad for item in pipe.parameters() if item.grad is not None]
                # Summed gradients are parts of one tensor for each bucket, which lives as long as they do.
                buckets = {id(item._base): item._base for item in gradients if item._base is not None}
                held = len(gradients) + len(buckets)
                if case.engine == "bapipe":  # torch's engine keeps buffers from step to step
                    tensors.append(count_tensors(tensors[0] + held) - held)
                differences.append(_compare(case, pipe, plan, alone, step, losses[-1]))
            else:
                optimizer.step()
                optimizer.zero_grad()
    gc.enable()
    pipe.close()
    return {
        "losses": losses,
        "expected_losses": alone.losses,
        "evaluated": evaluated,
        "expected_evaluated": alone.evaluated,
        "random": len(own.program.random),
        "differences": differences,
        "weights": _weights(pipe, alone) if optimizer is not None else None,
        "parameters": [name for name, _ in pipe.named_parameters()],
        "unused": own.unused,
        "all_parameters": [name for name, _ in own.module.named_parameters()],
        "wrongly_none": _wrongly_none(pipe, alone) if optimizer is None else [],
        "gradient_hashes": {name: _hash(item.grad) for name, item in pipe.named_parameters()},
        "peak_in_flight": live,
        "graphs": {stage: item.peak for stage, item in graphs.items()},
        "received": received.peak,
        "sent": sent.peak,
        "crossing": {
            stage: (
                len(own.crossing(plan.stages[stage].first_layer - 1)) if stage else 0,
                len(own.crossing(plan.stages[stage].last_layer)) if stage < len(plan.stages) - 1 else 0,
            )
            for stage in pipe.stages
        },
        "left": left,
        "tensors": tensors,
        "needs_data": needs_data,
    }


def _roots(captured: Captured, plan: Plan, stage: int) -> bool:
    part = plan.stages[stage]
    return bool(captured.stage(part.first_layer, part.last_layer).stage_spec.roots)


def _share(pipe: Pipeline, plan: Plan) -> Share:
    """Which replica of its stage this rank is; ranks with several stages have no replicas."""
    stage = pipe.stages[0]
    ranks, dealing = plan.schedule.placement[stage], plan.schedule.dealing
    return ranks.index(pipe.rank), len(ranks), dealing[stage] if dealing else ()


def _compare(case: Case, pipe: Pipeline, plan: Plan, alone: Alone, step: int, loss: float) -> tuple[float, str]:
    """The largest relative difference of the loss, any gradient and any running statistic, and of which."""
    gradients = {name: item.grad for name, item in pipe.named_parameters() if item.grad is not None}
    own = {name for name, _ in pipe.named_parameters()}
    expected = {name: item for name, item in alone.gradients[step].items() if name in own}
    found = Result(
        output=(), loss=torch.tensor(loss).double(), gradients=gradients, buffers=dict(pipe.named_buffers())
    )
    truth = Result(
        output=(),
        loss=torch.tensor(alone.losses[step]).double(),
        gradients=expected,
        buffers=alone.buffers[_share(pipe, plan)][step],
    )
    difference, what = largest_difference(found, truth)
    return difference, f"{what}, {case.name}"


def _wrongly_none(pipe: Pipeline, alone: Alone) -> list[str]:
    """Parameters that have a gradient here and none alone, or the other way."""
    expected = alone.gradients[-1]
    return [name for name, item in pipe.named_parameters() if (item.grad is None) == (name in expected)]


def _weights(pipe: Pipeline, alone: Alone) -> tuple[float, str]:
    """As `_compare`, of the weights."""
    zero = torch.zeros(())
    found = Result(output=(), loss=zero, gradients={}, buffers=pipe.state_dict())
    return largest_difference(found, Result(output=(), loss=zero, gradients={}, buffers=alone.weights))


def _hash(gradient: Tensor | None) -> str | None:
    if gradient is None:
        return None
    return hashlib.blake2b(gradient.contiguous().numpy().tobytes(), digest_size=8).hexdigest()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
