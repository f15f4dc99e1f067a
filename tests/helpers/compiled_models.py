"""Small models, and their training stage by stage in this process, with layers compiled or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.torch.capturing import Captured, capture
from bapipe.torch.capturing.torch_internals import flatten
from bapipe.torch.compiling.compiled_layers import CompiledPrograms, StageLayers
from bapipe.torch.stage.loss import LossSum
from bapipe.torch.stage.runner import StageRunner

__all__ = ["SIZE", "Blocks", "Convolutions", "Mlp", "Pair", "Trained", "captured_of", "train"]

SIZE, COUNT = 4, 3


class Mlp(nn.Module):
    """Batch norm, whose statistics are written, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, value: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            value = value + functional.dropout(norm(layer(value)).relu(), 0.25, self.training)
        return self.head(value).square().mean()


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(drop)

    def forward(self, value: Tensor) -> Tensor:
        parts = self.attention(self.first(value)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        value = value + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return value + self.drop(self.down(functional.gelu(self.up(self.second(value)))))


class Blocks(nn.Module):
    """Token embedding, equal blocks, a tied head and a loss over integer labels."""

    def __init__(self, blocks: int = 3, drop: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(8, drop) for _ in range(blocks))
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        value = self.embed(tokens)
        for block in self.blocks:
            value = block(value)
        logits = functional.linear(self.norm(value), self.embed.weight)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Pair(nn.Module):
    """Two layers, in which bf16 rounds often."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, value: Tensor) -> Tensor:
        return functional.gelu(self.second(functional.gelu(self.first(self.norm(value))))).square().mean()


class Convolutions(nn.Module):
    """Convolutions, the gradients of whose weights and inputs come from one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3),
        )
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.body(image).flatten(1)).logsumexp(-1).mean()


def captured_of(name: str, dtype: torch.dtype = torch.float64) -> Captured:
    """A model of this file, captured with an example."""
    torch.manual_seed(0)
    if name == "blocks":
        tokens = torch.randint(16, (SIZE, 5))
        return capture(Blocks().to(dtype), (tokens, tokens.flip(1)), check=False)
    if name == "pair":
        return capture(Pair().to(dtype), (torch.randn(SIZE, 16).to(dtype),), check=False)
    if name == "convolutions":
        return capture(Convolutions().to(dtype), (torch.randn(SIZE, 3, 6, 6, dtype=dtype),), check=False)
    return capture(Mlp().to(dtype), (torch.randn(SIZE, 8, dtype=dtype),), check=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What one global batch leaves."""

    loss: float
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def train(
    captured: Captured,
    cuts: Sequence[int] = (),
    *,
    programs: CompiledPrograms | None = None,
    split: bool = False,
    recompute: bool = False,
) -> Trained:
    """One global batch through stages cut before these layers; the module is left as it was."""
    module = captured.module
    saved = {name: item.clone() for name, item in module.state_dict().items()}
    module.zero_grad()
    sizes = [SIZE] * COUNT
    loss = LossSum(None, sizes)
    bounds = [0, *cuts, len(captured.layers)]
    runners: list[StageRunner] = []
    for index in range(len(bounds) - 1):
        first, last = bounds[index], bounds[index + 1] - 1
        stage = captured.stage(first, last, count_loss=True)
        if programs is not None:
            layers = StageLayers(first=first, last=last, parts={}, store={}, count_loss=True)
            programs.attach(stage, captured, layers)
        ends = last == len(captured.layers) - 1
        runners.append(
            StageRunner(
                index,
                {SIZE: stage},
                sizes=sizes,
                split=split,
                recompute=recompute,
                loss=loss if ends else None,
                output=captured.output if ends else None,
            )
        )
    leaves = flatten(captured.examples.resized(SIZE).tree())[0]
    batch: list[Any] = [[leaf if index == 0 else leaf.roll(index, 0) for leaf in leaves] for index in range(COUNT)]
    loss.begin()
    for runner in runners:
        runner.begin(7, batch, [None] * COUNT)
    for number in range(COUNT):
        values: tuple[Tensor, ...] = ()
        for runner in runners:
            values = runner.forward(number, values)
    for number in range(COUNT):
        values = ()
        for runner in reversed(runners):
            if recompute:
                runner.again(number)
            values = (runner.input_gradient if split else runner.backward)(number, values)
    for number in range(COUNT if split else 0):
        for runner in runners:
            runner.weight_gradient(number)
    for runner in runners:
        assert runner.idle
        runner.end()
    found = Trained(
        loss=loss.sums().loss,
        gradients={name: item.grad.clone() for name, item in module.named_parameters() if item.grad is not None},
        buffers={name: item.clone() for name, item in module.named_buffers()},
    )
    module.zero_grad()
    module.load_state_dict(saved)
    return found
