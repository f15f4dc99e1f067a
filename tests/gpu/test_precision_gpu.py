"""Precisions on a GPU: what is multiplied how, and what mixed precision takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bapipe.hardware.precision import find_precision
from bapipe.torch.device.precision_modes import MixedForward, set_precision
from bapipe.torch.profiler import MeasureSettings, predicted_peak, profile_model
from bapipe.torch.runtime.loss_scaler import LossScaler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
DEVICE = torch.device("cuda", 0)
SMALL = {"blocks": 4, "width": 512, "vocabulary": 1024, "sequence": 128}


@pytest.mark.parametrize("word", ["fp32", "tf32", "bf16-mixed"])
def test_tf32_is_used_where_it_is_asked_for(word: str) -> None:
    if torch.cuda.get_device_capability(DEVICE) < (8, 0):
        pytest.skip("no TensorFloat-32")
    set_precision(find_precision(word), DEVICE)
    left, right = (torch.randn(512, 512, device=DEVICE) for _ in range(2))
    wanted = left.double() @ right.double()
    error = float(((left @ right).double() - wanted).abs().max() / wanted.abs().max())
    assert (error > 1e-4) == (word == "tf32")
    set_precision(find_precision("fp32"), DEVICE)


def _keep_library_memory() -> None:
    """Let cuBLAS allocate its workspace, which it keeps."""
    small = torch.randn(64, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.linear(small, small).sum().backward()


def test_weights_are_cast_once_for_a_global_batch() -> None:
    weight = torch.nn.Parameter(torch.randn(4096, 4096, device=DEVICE))
    inputs = torch.randn(8, 4096, device=DEVICE)
    mixed = MixedForward(DEVICE, torch.bfloat16)
    _keep_library_memory()
    before = torch.cuda.memory_allocated(DEVICE)
    with mixed.batch():
        for _ in range(3):
            with mixed.forward():
                output = torch.nn.functional.linear(inputs, weight).sum()
            output.backward()
            del output
            held = torch.cuda.memory_allocated(DEVICE) - before - weight.nbytes
            assert held == pytest.approx(weight.nbytes / 2, rel=0.02), "one cast, and the gradient"
    assert torch.cuda.memory_allocated(DEVICE) - before == pytest.approx(weight.nbytes, rel=0.02)


def test_the_predicted_peak_of_mixed_precision_is_the_allocators(tmp_path: Path) -> None:
    found = profile_model(
        "gpt",
        settings=MeasureSettings(microbatches=(4,), folder=tmp_path, seconds=0.02),
        device="cuda",
        precision="bf16-mixed",
        optimizer="adamw(fused=true)",
        args=SMALL,
    )
    assert found.complete
    (table,) = found.profile.accelerators.values()
    assert table.weight_casts is not None
    assert 0 < sum(table.weight_casts) <= sum(found.profile.weight_bytes) / 2
    assert table.optimizer_state == pytest.approx(8, rel=0.05)
    assert table.optimizer_workspace == pytest.approx(0, abs=0.5)
    peak = max(item.peak for item in found.measured.whole if item.peak is not None)
    assert predicted_peak(found.measured, 4) == pytest.approx(peak, rel=0.1)


def test_a_scaler_finds_what_is_infinite() -> None:
    parameters = [torch.nn.Parameter(torch.ones(8, device=DEVICE)) for _ in range(3)]
    scaler = LossScaler(lambda: parameters, DEVICE, lambda value: value, init_scale=4.0)
    for item in parameters:
        item.grad = torch.full_like(item, 8.0)
    scaler.scale(torch.ones((), device=DEVICE))
    scaler.unscale_()
    assert scaler.skipped is False
    assert parameters[0].grad is not None
    assert parameters[0].grad.tolist() == [2.0] * 8
    parameters[1].grad = torch.full_like(parameters[1], torch.inf)
    scaler.scale(torch.ones((), device=DEVICE))
    scaler.unscale_()
    assert scaler.skipped is True
