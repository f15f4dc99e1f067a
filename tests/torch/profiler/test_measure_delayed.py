"""The backward in two parts as it is timed and weighed for the profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bapipe.costs.profile import CostTable
from bapipe.costs.segments import make_chain
from bapipe.costs.stage_memory import stage_bytes
from bapipe.models.layers import ModelRef
from bapipe.torch.profiler import MeasureSettings, profile_module
from bapipe.torch.profiler.assemble_profile import to_profile
from bapipe.torch.profiler.layer_times import layer_times
from bapipe.torch.profiler.measurement import Measurement, Reading
from bapipe.torch.profiler.statistics import summarise

WIDE, NARROW, BATCH = 4096, 1024, 16
ROWS = 4 * BATCH
"""bytes of a column of values"""


class _Block(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.up, self.inside, self.down = nn.Linear(NARROW, WIDE), inside, nn.Linear(WIDE, NARROW)

    def forward(self, value: Tensor) -> Tensor:
        return torch.as_tensor(self.down(self.inside(self.up(value))))


def profiled(inside: nn.Module, folder: Path) -> tuple[CostTable, Measurement]:
    torch.manual_seed(0)
    found = profile_module(
        nn.Sequential(nn.Linear(NARROW, NARROW), _Block(inside)),
        (torch.randn(2, NARROW),),
        model=ModelRef(name="block"),
        settings=MeasureSettings(microbatches=(BATCH,), folder=folder, seconds=0.002, whole=False),
    )
    (table,) = found.profile.accelerators.values()
    return table, found.measured


def test_inputs_of_products_and_gradients_of_their_outputs_wait(tmp_path: Path) -> None:
    """Up: its input and wide gradients; down: wide inputs and its gradients. What lies between is not held."""
    plain, _ = profiled(nn.Identity(), tmp_path / "plain")
    deep, _ = profiled(nn.Sequential(nn.Sigmoid(), nn.Softmax(-1), nn.Sigmoid()), tmp_path / "deep")
    assert plain.delayed is not None
    assert deep.delayed is not None
    assert sum(plain.delayed[0][1:]) == sum(deep.delayed[0][1:]) == ROWS * (NARROW + WIDE + WIDE + NARROW)
    assert sum(deep.saved_activations[0][1:]) >= ROWS * (NARROW + 3 * WIDE)
    # A first layer sends no error on: all that its backward needs waits, and the error that came.
    assert plain.delayed[0][0] == plain.saved_activations[0][0] + ROWS * NARROW


def test_measurements_from_before_know_neither(tmp_path: Path) -> None:
    _, measured = profiled(nn.Identity(), tmp_path)
    old = replace(
        measured,
        timings=tuple(replace(item, weight_gradient=None, delayed=None) for item in measured.timings),
    )
    (table,) = to_profile(old, accelerator="cpu", model=ModelRef(name="block")).accelerators.values()
    assert table.delayed is None
    assert table.parting is not None
    assert not any(table.parting[0])
    chain = make_chain(to_profile(old, accelerator="cpu", model=ModelRef(name="block")), ("cpu",), BATCH)
    assert stage_bytes(chain, 1, len(chain) - 1).delayed == pytest.approx(sum(table.saved_activations[0][1:]))


def test_what_both_parts_take_beyond_the_whole(tmp_path: Path) -> None:
    """Scaled to what all units take together, because a unit's own difference may be noise."""
    _, measured = profiled(nn.Identity(), tmp_path)

    def reading(value: float) -> Reading:
        return Reading(host=summarise([value]))

    def timed(extra: dict[int, float]) -> tuple[float, ...]:
        zero = replace(measured, empty_backward=reading(0.0))
        timings = tuple(
            item
            if item.weight_gradient is None
            else replace(
                item,
                backward=reading(3.0),
                input_gradient=reading(2.0),
                weight_gradient=reading(1.0 + extra[item.first]),
            )
            for item in zero.timings
        )
        return layer_times(replace(zero, timings=timings), BATCH).parting

    firsts = sorted({item.first for item in measured.timings if item.weight_gradient is not None})
    assert len(firsts) >= 1
    assert sum(timed(dict.fromkeys(firsts, 0.5))) == pytest.approx(0.5 * len(firsts))
    assert sum(timed(dict.fromkeys(firsts, -0.5))) == 0.0
    if len(firsts) > 1:
        mixed = {first: 1.0 if first == firsts[0] else -0.25 for first in firsts}
        assert sum(timed(mixed)) == pytest.approx(1.0 - 0.25 * (len(firsts) - 1))
