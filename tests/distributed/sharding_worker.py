"""Ranks that train with optimizer states on every replica and sharded over them. Usage: sharding_worker.py FOLDER.

Every case leaves its weights, its losses, and what its optimizer holds.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_plans import Leg, cut_plan
from forked_ranks import run_cases
from torch import Tensor, nn

from bapipe.records.plan import Plan
from bapipe.schedule.generators import capped, data_parallel, make_schedule, with_update
from bapipe.torch.capturing import Captured, capture
from bapipe.torch.checkpoint.checkpoints import Checkpoints
from bapipe.torch.inputs.master_weights import MasterWeights
from bapipe.torch.runtime import gradient_sync
from bapipe.torch.runtime.pipeline import Pipeline

SIZE, MICROBATCHES, WORDS = 2, 4, 13
gradient_sync.BUCKET_BYTES = 700  # several buckets, weights larger than one, and chunks that end inside of weights


class Tied(nn.Module):
    """Embedding and classifier share a weight; a layer is frozen, and one weight is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 7)
        self.first = nn.Linear(7, 11)
        self.norm = nn.LayerNorm(11)
        self.frozen = nn.Linear(11, 11).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.second = nn.Linear(11, 7)
        self.classifier = nn.Linear(7, WORDS, bias=False)
        self.classifier.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(self.embedding(words))))
        hidden = torch.tanh(self.frozen(hidden)) * self.scale
        return self.classifier(torch.tanh(self.second(hidden)))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (size, 6), generator=chance)
    return words[:, :-1], words[:, 1:]


SCHEDULES = {
    "alone": make_schedule("gpipe", 1, MICROBATCHES),
    "dp2": data_parallel(2, 2),
    "dp4": data_parallel(4, 1),
    "hybrid": with_update(capped(2, MICROBATCHES, [2, 2], replicas=[2, 1])),
    "both": with_update(capped(2, MICROBATCHES, [2, 2], replicas=[2, 2])),
}
CUTS = {"hybrid": (("first", None),), "both": (("first", None),)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One training."""

    ranks: str
    """of `SCHEDULES`"""
    zero: bool
    optimizer: str = "adamw"
    """adamw with groups, clipping and a schedule; momentum; masters; scaled, with an overflow; rmsprop"""
    steps: int = 20
    resume: str | None = None
    """name of the training whose checkpoint it goes on from"""
    save: bool = False
    numbers: str = "float32"

    @property
    def name(self) -> str:
        kind = "zero" if self.zero else "plain"
        return f"{self.ranks}-{kind}-{self.optimizer}-{self.numbers}-{self.steps}-{self.resume}"

    @property
    def world(self) -> int:
        return SCHEDULES[self.ranks].num_ranks


EQUAL = [
    (Work(ranks="dp2", zero=False, optimizer=kind), Work(ranks="dp2", zero=True, optimizer=kind))
    for kind in ("adamw", "momentum", "masters", "scaled", "rmsprop")
]
"""trainings of which the second must be bit for bit as the first"""
HYBRIDS = [
    (Work(ranks=ranks, zero=False, numbers="float64"), Work(ranks=ranks, zero=True, numbers="float64"))
    for ranks in ("dp4", "hybrid", "both")
]
"""trainings that sum in another order"""
HALF = 3
_SAVED = [
    Work(ranks=ranks, zero=zero, steps=HALF, save=True, numbers="float64")
    for ranks, zero in (("dp4", True), ("dp2", True), ("alone", False), ("dp2", False))
]
STRAIGHT = Work(ranks="alone", zero=False, steps=2 * HALF, numbers="float64")
RESUMED = [
    Work(ranks=ranks, zero=zero, steps=2 * HALF, resume=saved.name, numbers="float64")
    for saved in _SAVED
    for ranks, zero in (("alone", False), ("dp2", True), ("dp2", False), ("dp4", True), ("hybrid", True))
    if saved.zero or (zero and ranks == "dp2")
]
WORKS = [*(work for pair in (*EQUAL, *HYBRIDS) for work in pair), *_SAVED, STRAIGHT, *RESUMED]


def plan_of(work: Work, captured: Captured) -> Plan:
    leg = Leg(name=work.ranks, schedule=SCHEDULES[work.ranks], cuts=CUTS.get(work.ranks, ()))
    names = [layer.name for layer in captured.layers]
    plan = cut_plan(leg, names, [None] * len(names), size=SIZE, fingerprint=captured.fingerprint)
    dtype = "bf16" if work.optimizer == "masters" else {"float32": "fp32", "float64": "fp64"}[work.numbers]
    return dataclasses.replace(plan, zero_stage=int(work.zero), dtype=dtype)


def make_optimizer(pipe: Pipeline, kind: str) -> torch.optim.Optimizer:
    if kind == "masters":
        trained = [item for item in pipe.parameters() if item.requires_grad]
        return pipe.make_optimizer(
            lambda own: MasterWeights(own, lambda masters: torch.optim.Adam(masters, lr=1e-2)), trained
        )
    makes: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
        "adamw": lambda own: torch.optim.AdamW(own, lr=1e-2),
        "momentum": lambda own: torch.optim.SGD(own, lr=1e-2, momentum=0.9),
        "scaled": lambda own: torch.optim.Adam(own, lr=1e-2, amsgrad=True),
        "rmsprop": lambda own: torch.optim.RMSprop(own, lr=1e-3, centered=True),
    }
    decayed = [item for item in pipe.parameters() if item.ndim > 1]
    others = [item for item in pipe.parameters() if item.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return pipe.make_optimizer(makes[kind], groups if kind == "adamw" else None)


def train(work: Work, captured: Captured, folder: Path) -> dict[str, Any]:
    model = dataclasses.replace(captured, module=copy.deepcopy(captured.module))
    pipe = Pipeline(model, plan_of(work, model), loss_fn, seed=None)
    optimizer = make_optimizer(pipe, work.optimizer)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    scaler = pipe.grad_scaler(init_scale=2.0**10, growth_interval=5) if work.optimizer == "scaled" else None
    saved = {"optimizer": optimizer, "scheduler": scheduler}
    if work.resume is not None:
        loaded = Checkpoints(pipe, folder / work.resume, read_only=True, **saved).load()
        assert loaded is not None, work.resume
        assert loaded.step == pipe.steps == HALF
    losses, norms = [], []
    while pipe.steps < work.steps:
        step = pipe.steps
        losses.append(pipe.step(*batch(step, pipe.plan.global_batch), scaler=scaler))
        if scaler is None:
            norms.append(pipe.clip_grad_norm_(0.5) if work.optimizer == "adamw" else 0.0)
            optimizer.step()
        else:
            if step == 7 and pipe.rank == 1:
                own = next(item.grad for item in pipe.engine.shards.stepped() if item.grad is not None)
                own.reshape(-1)[0] = math.inf  # one element of one rank
            scaler.step(optimizer)
            scaler.update()
            losses.append(scaler.get_scale())
        whole = {name: None if item is None else item.sum().item() for name, item in pipe.gradients().items()}
        scheduler.step()
        optimizer.zero_grad()
        assert all(item.grad is None for item in pipe.parameters())
    if work.save:
        checkpoints = Checkpoints(pipe, folder / work.name, **saved)
        checkpoints.save()
        checkpoints.close()
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    result = {
        "losses": [value.hex() for value in losses],
        "norms": norms,
        "gradients": whole,
        "state": sum(value.numel() for value in state if value.ndim),
        "parameters": sum(item.numel() for item in pipe.parameters() if item.requires_grad),
    }
    torch.save(
        {name: item.detach() for name, item in pipe.named_parameters()}, folder / f"{work.name}-{pipe.rank}.pt"
    )
    pipe.close()
    dist.barrier()
    return result


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    captures = {}
    for numbers in ("float32", "float64", "bfloat16"):
        torch.manual_seed(3)
        words, _ = batch(0, SIZE)
        captures[numbers] = capture(Tied().to(getattr(torch, numbers)), (words,), {}, check=False)

    def run(index: int) -> dict[str, Any]:
        work = WORKS[index]
        return train(work, captures["bfloat16" if work.optimizer == "masters" else work.numbers], folder)

    return run_cases(folder, [work.world for work in WORKS], run)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
