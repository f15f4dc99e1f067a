"""Measuring on a GPU: events, the allocator's peak, and running out of its memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bapipe.models.layers import ModelRef
from bapipe.torch.capturing.torch_internals import flatten_recurrent
from bapipe.torch.profiler import MeasureSettings, predicted_peak, profile_model, profile_module
from bapipe.torch.profiler.layer_clock import CudaClock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]


class Hungry(nn.Module):
    """Takes the thirteenth power of the batch in bytes, for a moment: 8 kB for two samples, 550 GB for eight."""

    def forward(self, value: Tensor) -> Tensor:
        room = value.new_empty((len(value),) * 13, dtype=torch.uint8)
        return value * (1 + 0 * room[(0,) * 12][:1].to(value.dtype))


def test_the_queue_hides_launches() -> None:
    clock = CudaClock(torch.device("cuda"))
    small = torch.ones(16, device="cuda")
    for _ in range(10):
        clock.begin()
        clock.mark()
        for _ in range(20):
            small.add_(1)
        clock.mark()
        laps = clock.read()
        if laps is not None:
            break
    assert laps is not None
    assert laps[0].device is not None
    assert laps[0].device > 0


def test_weights_of_a_recurrent_layer_are_laid_in_one_piece() -> None:
    """Else cuDNN copies them in every forward, and the backward keeps the copy."""
    module = nn.Sequential(nn.LSTM(64, 256, batch_first=True), nn.Identity())
    weights = {name: nn.Parameter(item.detach().cuda()) for name, item in module.named_parameters()}
    places = {item.untyped_storage().data_ptr() for item in weights.values()}
    assert len(places) == 4
    values = {name: item.detach().clone() for name, item in weights.items()}
    flatten_recurrent(module, weights)
    assert len({item.untyped_storage().data_ptr() for item in weights.values()}) == 1
    assert all(torch.equal(item, values[name]) for name, item in weights.items())
    given = torch.randn(4, 8, 64, device="cuda")
    state = torch.zeros(1, 4, 256, device="cuda")
    lstm = module[0]
    kept: list[int] = []

    def noted(item: Tensor) -> Tensor:
        kept.append(item.data_ptr())
        return item

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda item: item):
        torch.lstm(given, (state, state), list(weights.values()), True, 1, 0.0, True, False, True)
    first = weights["0.weight_ih_l0"].data_ptr()
    assert first in kept
    assert all(item.device.type == "cpu" for item in lstm._flat_weights)


def test_a_model_is_profiled_with_its_peak(tmp_path: Path) -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(),
        nn.Linear(64 * 62 * 62, 10),
    )  # fmt: skip
    found = profile_module(
        module,
        (torch.randn(2, 3, 64, 64),),
        model=ModelRef(name="small"),
        settings=MeasureSettings(microbatches=(8, 64), folder=tmp_path, seconds=0.02),
        device="cuda",
    )
    (table,) = found.profile.accelerators.values()
    assert table.microbatches == (8, 64)
    assert all(item.forward.device is not None for item in found.measured.timings)
    predicted = predicted_peak(found.measured, 64)
    peak = max(step.peak or 0.0 for step in found.measured.whole if step.microbatch == 64)
    assert predicted == pytest.approx(peak, rel=0.05)
    assert table.library is not None
    assert table.library[-1] > 1e6 > table.library[0]  # matrix products keep a workspace, convolutions do not


def test_weight_gradients_that_were_put_off_need_no_room_for_errors(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
    found = profile_module(
        module,
        (torch.randn(8, 512),),
        model=ModelRef(name="products"),
        settings=MeasureSettings(microbatches=(2**17,), folder=tmp_path, seconds=0.01),
        device="cuda",
    )
    (table,) = found.profile.accelerators.values()
    assert table.weight_workspace is not None
    assert table.backward_workspace is not None
    own, error = found.profile.layers[-1].weight_bytes, 2**17 * 512 * 4
    weights, whole = table.weight_workspace[0][-1], table.backward_workspace[0][-1]
    assert own <= weights < whole - error / 2


def test_out_of_memory_is_recorded(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 8), Hungry(), nn.Linear(8, 2))
    found = profile_module(
        module,
        (torch.randn(2, 8),),
        model=ModelRef(name="hungry"),
        settings=MeasureSettings(microbatches=(1, 2, 8), folder=tmp_path, seconds=0.01),
        device="cuda",
    )
    (table,) = found.profile.accelerators.values()
    assert table.microbatches == (1, 2)
    assert table.not_fitting == (8,)


def test_a_captured_model_on_the_gpu(tmp_path: Path) -> None:
    found = profile_model(
        "gpt",
        settings=MeasureSettings(microbatches=(4,), folder=tmp_path, seconds=0.02),
        device="cuda",
        precision="bf16",
        args={"blocks": 2, "width": 64, "vocabulary": 256, "sequence": 32},
    )
    assert found.complete
    assert found.profile.dtype == "bf16"
    together, step = found.measured.issue_together(4), found.measured.step(4, eager=False)
    assert together is not None
    assert step is not None
    assert 0 < sum(together) < 1.5 * step.median
