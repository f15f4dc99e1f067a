"""Which modules a captured layer has: of its operations, of values that every stage repeats, and silent ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bapipe.torch.capturing import capture


class Halves(nn.Module):
    """A block of two layers with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.one = nn.LayerNorm(4), nn.Linear(4, 4)
        self.norm2, self.two = nn.LayerNorm(4), nn.Linear(4, 4)
        self.off = nn.Dropout(0.0)

    def forward(self, value: Tensor) -> Tensor:
        value = value + self.one(self.norm1(value))
        result: Tensor = value + self.off(self.two(self.norm2(value)))
        return result


class Positions(nn.Module):
    """Depends on sizes alone, so every stage computes it anew."""

    def forward(self, value: Tensor) -> Tensor:
        return torch.arange(value.shape[1], dtype=value.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.silent = nn.Identity()
        self.positions = Positions()
        self.blocks = nn.ModuleList([Halves(), Halves()])
        self.head = nn.Linear(4, 2)

    def forward(self, value: Tensor) -> Tensor:
        value = self.silent(self.embed(value))
        places = self.positions(value)
        for block in self.blocks:
            value = block(value + places)
        result: Tensor = self.head(value)
        return result


def test_every_module_is_in_a_layer() -> None:
    captured = capture(Net(), (torch.ones(2, 4),))
    found = {layer.name: layer.modules for layer in captured.layers}
    assert list(found) == ["embed", "blocks.0.one", "blocks.0.two", "blocks.1.one", "blocks.1.two", "head"]
    assert "blocks.0.norm1" in found["blocks.0.one"]
    assert {"blocks.0", "blocks.0.norm2", "blocks.0.off"} <= set(found["blocks.0.two"])
    assert "silent" in found["embed"]
    assert sum("positions" in modules for modules in found.values()) == 1
    heard = {path for modules in found.values() for path in modules}
    assert {path for path, module in Net().named_modules() if path and not list(module.children())} <= heard


def test_profiles_and_plans_keep_them() -> None:
    from bapipe import plan, profile

    made = profile(Net(), (torch.ones(2, 4),), micro_batches=(2,), accelerator="v100-16")
    assert made.layers[0].modules[0] == "embed"
    stages = plan(made, "2xv100", global_batch=8, stages=2).stages
    assert stages[0].modules[0] == "embed"
    assert "head" in stages[1].modules
