"""A precision on a CPU: what is refused, when weights are cast, and what is read of torch's private parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bapipe.errors import BaPipeError
from bapipe.hardware.precision import PRECISIONS, find_precision
from bapipe.torch.device.dtypes import autocast_dtype, weights_dtype
from bapipe.torch.device.precision_modes import MixedForward, set_precision
from bapipe.torch.device.tensor_internals import casts_within, copy_tensors, multiply_gradients

CPU = torch.device("cpu")


def test_a_cpu_has_all_but_tf32() -> None:
    for word in PRECISIONS.keys() - {"tf32"}:
        set_precision(find_precision(word), CPU)
    with pytest.raises(BaPipeError, match=r"tf32 needs a GPU of compute capability 8\.0 or more"):
        set_precision(find_precision("tf32"), CPU)


def test_dtypes_by_their_words() -> None:
    assert weights_dtype("tf32") is weights_dtype("fp16-mixed") is torch.float32
    assert autocast_dtype(find_precision("fp16-mixed")) is torch.float16
    assert autocast_dtype(find_precision("fp16")) is None
    with pytest.raises(BaPipeError, match="nothing is trained in fp8 here; use one of fp32"):
        weights_dtype("fp8")


@pytest.fixture
def layer() -> tuple[nn.Linear, Callable[[], torch.Tensor]]:
    linear, inputs = nn.Linear(4, 3), torch.randn(2, 4)
    return linear, lambda: linear(inputs)


def test_weights_are_cast_once_for_a_global_batch(layer: tuple[nn.Linear, Callable[[], torch.Tensor]]) -> None:
    linear, run = layer
    mixed, parameters = MixedForward(CPU, torch.bfloat16), list(linear.parameters())

    def casts(*, keep: bool = True) -> int:
        with mixed.forward(keep=keep):
            made, found = casts_within(run, parameters, torch.bfloat16)
        assert made.dtype == torch.bfloat16
        assert not torch.is_autocast_enabled("cpu"), "backwards run outside of it"
        made.sum().backward()
        return len(found)

    with mixed.batch():
        assert [casts(), casts(), casts(keep=False), casts()] == [2, 0, 2, 0]
    with mixed.batch():
        assert casts() == 2
    assert [casts(), casts()] == [2, 2], "outside of a global batch nothing is kept"
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32


def test_what_is_known_of_casts(layer: tuple[nn.Linear, Callable[[], torch.Tensor]]) -> None:
    linear, run = layer
    with torch.autocast("cpu", torch.bfloat16):
        _, found = casts_within(run, [linear.weight], torch.bfloat16)
    assert found.keys() == {id(linear.weight)}
    address, size = found[id(linear.weight)]
    assert address != linear.weight.data_ptr()
    assert size == 2 * linear.weight.numel()


def test_gradients_are_multiplied_whatever_their_dtypes() -> None:
    own = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16), torch.ones(0)]
    assert not multiply_gradients(own, 0.5, CPU)
    assert [item.sum().item() for item in own] == [1.5, 1.0, 0.0]
    for wrong in (torch.inf, -torch.inf, torch.nan):
        assert multiply_gradients([*own, torch.tensor([1.0, wrong])], 1.0, CPU)
    assert not multiply_gradients([], 1.0, CPU)


def test_tensors_are_copied_from_another_dtype() -> None:
    targets = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float16)]
    copy_tensors(targets, [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])])
    assert [item.tolist() for item in targets] == [[1.0, 2.0, 3.0], [4.0, 5.0]]
