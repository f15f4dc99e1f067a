"""Ranks that train under torch's DDP and FSDP2 and count the bytes of their tensors. Usage: … FOLDER.

The folder has the plans of the cases; every case leaves the most that a rank held, and what was gathered when.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from forked_ranks import run_cases
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from bapipe.records.plan import read_plan
from bapipe.torch.inputs.build_model import BuiltModel
from bapipe.torch.inputs.make_optimizer import make_optimizer
from bapipe.torch.runtime.plan_checks import trusted_plan
from bapipe.torch.runtime.torch_engines import TorchEngine
from counted_bytes import CountedBytes

WIDTH, HEADS, BLOCKS, ROWS, WORLD, STEPS = 384, 2 * 384, 4, 2, 2, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A training."""

    engine: str
    microbatches: int
    """of each rank in a step"""
    optimizer: str

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.microbatches}-{self.optimizer.partition('(')[0]}"


CASES = [
    Case(engine=engine, microbatches=count, optimizer=optimizer)
    for engine in ("ddp", "fsdp")
    for count in (1, 3)
    for optimizer in ("sgd", "adam(fused=true)")
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.inner(value))


class Blocks(nn.Module):
    """Blocks in a list, each a unit of FSDP2, between two layers that are the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, HEADS, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        value = self.entry(value)
        for block in self.blocks:
            value = block(value)
        output: Tensor = self.head(value)
        return output


def train(case: Case, folder: Path) -> dict[str, Any]:
    torch.manual_seed(1)
    module, example = Blocks(), torch.zeros(ROWS, WIDTH)
    built = BuiltModel(module=module, args=(example,), kwargs={}, loss=nn.functional.mse_loss)
    runnable = trusted_plan(read_plan(folder / f"{case.name}.json"))
    engine = TorchEngine(built, runnable, torch.device("cpu"), transport="gloo", timeout=60.0)
    optimizer = make_optimizer(case.optimizer, engine.parameters, rate=1e-3)
    assert optimizer is not None
    gradients = [item.grad for item in engine.parameters if item.grad is not None]
    counted = CountedBytes([*engine.parameters, *gradients])
    del gradients
    events: list[str] = []
    with counted:
        for step in range(STEPS):
            events.clear()
            batch = WORLD * case.microbatches * ROWS
            chance = torch.Generator().manual_seed(step)
            inputs = torch.randn(batch, WIDTH, generator=chance)
            with _Noted(events):
                engine.step(inputs, inputs.repeat(1, HEADS // WIDTH))
            optimizer.step()
    return {"most": counted.most, "events": events[: len(events) // case.microbatches]}


class _Noted:
    """FSDP2's gathers, frees and scatters in a list, by the unit's name."""

    NAMES = ("unshard", "reshard", "post_backward")

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self._before = {name: getattr(FSDPParamGroup, name) for name in self.NAMES}

    def __enter__(self) -> None:
        for name, function in self._before.items():
            setattr(FSDPParamGroup, name, self._noting(name, function))

    def _noting(self, name: str, function: Any) -> Any:
        def noting(group: Any, *args: Any, **kwargs: Any) -> Any:
            whole = group.is_unsharded or group._all_gather_result is not None
            result = function(group, *args, **kwargs)
            unit = group._module_fqn or "root"
            if name == "unshard" and not whole:
                self._events.append(f"gather {unit}")
            elif name == "reshard" and whole and group.is_sharded:
                self._events.append(f"free {unit}")
            elif name == "post_backward" and group.fsdp_params:
                self._events.append(f"scatter {unit}")
            return result

        return noting

    def __exit__(self, *_: object) -> None:
        for name, function in self._before.items():
            setattr(FSDPParamGroup, name, function)


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    return run_cases(folder, [WORLD] * len(CASES), lambda index: train(CASES[index], folder))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
