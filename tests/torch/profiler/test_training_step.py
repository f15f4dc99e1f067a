"""The step that other slices are loaded with: forward and backward of the model, its layers compiled or not."""

from __future__ import annotations

import pytest
import torch

from bapipe.hardware.precision import find_precision
from bapipe.models.model_spec import model_ref
from bapipe.torch.compiling.compiled_layers import CompiledPrograms
from bapipe.torch.inputs.build_model import build_model
from bapipe.torch.profiler.training_step import training_step

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_a_load_that_is_compiled_makes_the_gradients_of_one_that_is_not(precision: str) -> None:
    found = []
    for compiled in (False, True):
        source = build_model(model_ref("examples.tiny_model:build", {"hidden": 16, "layers": 3}), seed=0)
        programs = CompiledPrograms(CPU, backend="graph") if compiled else None
        step = training_step(source, device=CPU, precision=find_precision(precision), size=4, programs=programs)
        step()
        step()
        found.append([item.grad for item in source.module.parameters()])
        assert programs is None or programs.compiled
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        assert torch.allclose(one, other, rtol=2e-2 if precision != "fp32" else 1e-5, atol=1e-4)
