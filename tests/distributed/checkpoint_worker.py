"""Processes that train, save under one plan and load under others. Usage: checkpoint_worker.py FOLDER.

Every model is captured once; then the process forks into four ranks. Training straight on under the first plan
leaves FOLDER/<model>/straight; three steps under a plan and three under another leave <first>-<second>, and what
the second had loaded, before its first step, <first>-<second>-again. Every rank leaves what it drew from its
random generators in draws-<training>-<rank>.json.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import gc
import json
import os
import random
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_plans import Leg, cut_plan
from equality_models import SUBJECTS, as_call, build, make_batch
from torch import nn

from bapipe.schedule.generators import capped, data_parallel, make_schedule, with_recompute, with_update
from bapipe.torch.capturing import Captured, capture
from bapipe.torch.checkpoint.checkpoints import Checkpoints
from bapipe.torch.runtime.pipeline import Pipeline

RANKS, MICROBATCHES, SIZE, HALF = 4, 4, 3, 3
TIMEOUT = datetime.timedelta(seconds=120)

LEGS: dict[str, tuple[Leg, ...]] = {
    "gnmt": (
        Leg(
            name="so3",
            schedule=make_schedule("1f1b-so", 3, MICROBATCHES),
            cuts=(("encoder.1", None), ("decoder.0", None)),
        ),
        Leg(
            name="zb4-vocabulary",
            schedule=make_schedule("zb-h1", 4, MICROBATCHES),
            cuts=(("encoder.0", None), ("decoder.0", None), ("classifier", 17)),
        ),
        Leg(
            name="sno3-directions",
            schedule=make_schedule("1f1b-sno", 3, MICROBATCHES),
            cuts=(("encoder.0", 1), ("decoder.1", 2)),
        ),
        Leg(
            name="hybrid-embedding",
            schedule=with_update(capped(2, MICROBATCHES, [2, 2], replicas=[2, 1])),
            cuts=(("target_embedding", 3),),
        ),
        Leg(name="alone", schedule=make_schedule("gpipe", 1, MICROBATCHES)),
        Leg(name="data-parallel", schedule=data_parallel(2, 2)),
    ),
    "gpt2": (
        Leg(
            name="so2", schedule=make_schedule("1f1b-so", 2, MICROBATCHES), cuts=(("transformer.h.1.attn", None),)
        ),
        Leg(
            name="gpipe4",
            schedule=with_recompute(make_schedule("gpipe", 4, MICROBATCHES), [1]),
            cuts=(("transformer.wte", None), ("transformer.h.0.mlp", None), ("transformer.h.2.attn", None)),
        ),
        Leg(
            name="interleaved",
            schedule=make_schedule("interleaved", 2, MICROBATCHES),
            cuts=(("transformer.h.0.attn", None), ("transformer.h.1.attn", None), ("transformer.h.2.attn", None)),
        ),
        Leg(name="alone", schedule=make_schedule("gpipe", 1, MICROBATCHES)),
    ),
    "resnet": (
        Leg(name="gpipe2", schedule=make_schedule("gpipe", 2, MICROBATCHES), cuts=(("layer2", None),)),
        Leg(
            name="so3-split",
            schedule=make_schedule("1f1b-so", 3, MICROBATCHES),
            cuts=(("conv1", 1), ("fc", 7)),
        ),
        Leg(name="alone", schedule=make_schedule("gpipe", 1, MICROBATCHES)),
    ),
}
"""the first is trained straight on; every other one goes on from it, and it goes on from every other one"""


def numbers_of(model: str) -> str:
    return "dropout" if SUBJECTS[model].dropout else "float64"


def make_module(model: str) -> nn.Module:
    """With a parameter and a buffer that nothing uses, but which are in its state_dict."""
    module = build(model, numbers_of(model))
    module.register_parameter("never_used", nn.Parameter(torch.full((2,), 7.0, dtype=torch.float64)))
    module.register_buffer("note", torch.arange(3))
    return module


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    captures = {}
    for model in LEGS:
        args, kwargs = as_call(make_batch(model, numbers_of(model), 0, SIZE)[0])
        captures[model] = capture(make_module(model), args, kwargs, check=False)
    gc.collect()
    gc.freeze()
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            gc.enable()
            try:
                run_rank(folder, rank, captures)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


def run_rank(folder: Path, rank: int, captures: Mapping[str, Captured]) -> None:
    jobs = []
    for model, (first, *others) in LEGS.items():
        jobs.append((model, first, "straight", None, 2 * HALF))
        jobs += [(model, leg, f"{leg.name}-half", None, HALF) for leg in (first, *others)]
        jobs += [
            (model, leg, f"{first.name}-{leg.name}", f"{first.name}-half", 2 * HALF) for leg in (first, *others)
        ]
        jobs += [(model, first, f"{leg.name}-{first.name}", f"{leg.name}-half", 2 * HALF) for leg in others]
    for index, (model, leg, name, source, steps) in enumerate(jobs):
        store = folder / f"store-{index}"
        world = leg.schedule.num_ranks
        # All wait for the files of the last job: a later one may have other ranks.
        _join(folder / f"store-all-{index}", rank, RANKS)
        dist.barrier()
        dist.destroy_process_group()
        if rank >= world:
            continue
        _join(store, rank, world)
        try:
            train(folder / model, captures[model], model, leg, name=name, source=source, steps=steps)
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


def _join(store: Path, rank: int, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=TIMEOUT)


def train(
    folder: Path, captured: Captured, model: str, leg: Leg, *, name: str, source: str | None, steps: int
) -> None:
    """An optimizer of two groups, rates and momenta that change; from a checkpoint if there is a source."""
    own = dataclasses.replace(captured, module=copy.deepcopy(captured.module))
    if source is not None:
        with torch.no_grad():  # what was built must not matter
            for tensor in own.module.state_dict().values():
                tensor.zero_()
    plan = cut_plan(
        leg,
        [layer.name for layer in own.layers],
        [None if layer.split is None else layer.split.channels for layer in own.layers],
        size=SIZE,
        fingerprint=own.fingerprint,
    )
    torch.manual_seed(0)
    random.seed(0)
    pipe = Pipeline(own, plan, SUBJECTS[model].loss, seed=None)
    decayed = [item for item in pipe.parameters() if item.ndim > 1]
    others = [item for item in pipe.parameters() if item.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    # Batch-norm over so few samples is ill-conditioned; AdamW's division would show that, not the checkpoint.
    optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9) if model == "resnet" else torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 2e-2], total_steps=2 * HALF + 1)
    options = {"optimizer": optimizer, "scheduler": scheduler}
    asynchronous = name.endswith("-half") and plan.kind != "data-parallel"
    checkpoints = Checkpoints(pipe, folder / name, asynchronous=asynchronous, keep=1, **options)
    place = 0
    if source is not None:
        loaded = Checkpoints(pipe, folder / source, **options).load()
        assert loaded is not None
        assert loaded.step == pipe.steps == HALF
        place = loaded.data["place"]
        again = Checkpoints(pipe, folder / f"{name}-again", **options)
        again.save(data=loaded.data)
        again.close()
    draws = []
    while pipe.steps < steps:
        draws.append([float(torch.rand(())), random.random()])
        inputs, targets = make_batch(model, numbers_of(model), 100 + place, plan.global_batch)
        place += 1
        pipe.step(inputs, targets)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (pipe.steps in (HALF - 1, HALF) and steps == HALF) or pipe.steps == steps:
            checkpoints.save(data={"place": place})
            # Saved is what was there now, even where it is written later.
            if asynchronous and pipe.steps == steps:
                with torch.no_grad():
                    for parameter in pipe.parameters():
                        parameter.zero_()
    checkpoints.close()
    (folder / f"draws-{name}-{pipe.rank}.json").write_text(json.dumps(draws), encoding="ascii")
    pipe.close()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name in LEGS:
        (folder / name).mkdir()
    sys.exit(main(folder))
