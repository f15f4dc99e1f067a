"""Profiles in mixed precision measure what a run executes: autocast, with weights that are cast once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bapipe.models.layers import ModelRef
from bapipe.torch.profiler import MeasureSettings, Profiled, profile_module

WIDTH = 32


class Block(nn.Module):
    """A layer that autocast casts, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return self.linear(self.norm(value).relu())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), Block(), Block(), Block(), nn.Linear(WIDTH, 5))


def profiled(folder: Path, precision: str, optimizer: str = "adam", **changes: object) -> Profiled:
    settings = MeasureSettings(microbatches=(2,), folder=folder, seconds=0.01, **changes)  # type: ignore[arg-type]
    return profile_module(
        model(),
        (torch.randn(2, 8),),
        model=ModelRef(name="blocks"),
        settings=settings,
        precision=precision,
        optimizer=optimizer,
        threads=1,
    )


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    return profiled(tmp_path_factory.mktemp("mixed"), "bf16-mixed", parts=True)


def test_weights_are_fp32_and_messages_are_not(mixed: Profiled) -> None:
    profile = mixed.profile
    (table,) = profile.accelerators.values()
    assert profile.dtype == "bf16-mixed"
    assert profile.weight_bytes.sum() == 4 * sum(item.numel() for item in model().parameters())
    assert profile.input_bytes == 8 * 4
    names = [layer.name for layer in profile.layers]
    last = names.index("0")
    assert table.boundary_forward[0][last] == 2 * WIDTH * 2
    assert table.boundary_backward[0][last] == 2 * WIDTH * 2
    assert table.optimizer_state == pytest.approx(8, abs=0.6), "two moments of fp32, and a count of steps a tensor"


def test_casts_are_of_what_autocast_casts(mixed: Profiled) -> None:
    (table,) = mixed.profile.accelerators.values()
    assert table.weight_casts is not None
    linear = sum(
        item.numel() for part in model().modules() if isinstance(part, nn.Linear) for item in part.parameters()
    )
    assert sum(table.weight_casts) == 2 * linear
    by_name = dict(zip((layer.name for layer in mixed.profile.layers), table.weight_casts, strict=True))
    assert by_name["0"] == 2 * (8 * WIDTH + WIDTH)
    assert not torch.is_autocast_enabled("cpu")


def test_casts_are_not_among_the_saved_activations(mixed: Profiled, tmp_path: Path) -> None:
    """They are kept once for all micro-batches: what two forwards of one region both save is neither's own."""
    (table,) = mixed.profile.accelerators.values()
    module, inputs = model(), torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        (_, first), (output, second) = saved(module, inputs), saved(module, inputs)
    known = {item.untyped_storage().data_ptr() for item in (inputs, *module.parameters())}
    both = {address: size for address, size in second.items() if address in first and address not in known}
    own = {address: size for address, size in second.items() if address not in {*first, *known}}
    assert sum(both.values()) == 2 * sum(item.numel() for item in linear_weights(module))
    own[output.untyped_storage().data_ptr()] = output.nbytes
    assert sum(table.saved_activations[0]) == sum(own.values()) + inputs.nbytes
    (full,) = profiled(tmp_path, "fp32").profile.accelerators.values()
    assert full.weight_casts is None


def saved(module: nn.Module, inputs: Tensor) -> tuple[Tensor, dict[int, int]]:
    """The output, whose graph holds what is saved, and the storages of that: address -> bytes."""
    found: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        return module(inputs), found


def linear_weights(module: nn.Module) -> list[Tensor]:
    """Of all layers but the first, whose input needs no gradient, so that its weight is not saved."""
    return [part.weight for part in module.modules() if isinstance(part, nn.Linear)][1:]


def test_every_weight_gets_a_gradient(tmp_path: Path) -> None:
    """What is cast without a graph would leave weights without gradients, and cost less."""
    module = model()
    settings = MeasureSettings(microbatches=(2, 4), folder=tmp_path, seconds=0.01)
    profile_module(
        module,
        (torch.randn(2, 8),),
        model=ModelRef(name="m"),
        settings=settings,
        precision="bf16-mixed",
        threads=1,
    )
    assert all(item.grad is not None and item.grad.dtype == torch.float32 for item in module.parameters())
    assert all(bool(item.grad.any()) for item in module.parameters() if item.grad is not None)


def test_master_weights_are_weighed(tmp_path: Path) -> None:
    found = profiled(tmp_path, "bf16", "adam(master_weights=true)")
    (table,) = found.profile.accelerators.values()
    assert table.optimizer == "adam(master_weights=true)"
    assert table.optimizer_state == pytest.approx(12, abs=0.6)
    assert table.optimizer_workspace is not None
    assert table.optimizer_workspace >= 4, "gradients in fp32, for the time of a step"
