"""Gradients have their weights' layout, whichever backward made them."""

from __future__ import annotations

import pytest
import torch

from bapipe.torch.device.gradient_layout import add_gradient, add_gradients


@pytest.mark.parametrize("shared", [False, True])
def test_a_gradient_is_laid_out_as_its_weight(shared: bool) -> None:
    weight = torch.zeros(4, 3, 2, 2)
    gradient = torch.rand(4, 3, 2, 2).to(memory_format=torch.channels_last)
    assert gradient.stride() != weight.stride()
    add_gradient(weight, gradient, shared=shared)
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    assert torch.equal(weight.grad, gradient)
    add_gradient(weight, gradient, shared=shared)
    assert torch.equal(weight.grad, 2 * gradient)


def test_a_gradient_of_its_own_is_not_copied() -> None:
    weight, gradient = torch.zeros(3, 2), torch.rand(3, 2)
    add_gradient(weight, gradient, shared=False)
    assert weight.grad is gradient
    other = torch.zeros(3, 2)
    add_gradient(other, gradient, shared=True)
    assert other.grad is not gradient
    assert torch.equal(other.grad, gradient) if other.grad is not None else False


def test_gradients_of_a_layer_are_added_together() -> None:
    weights = [torch.zeros(3, 2), torch.zeros(2, 3), torch.zeros(4), torch.zeros(4)]
    first = [torch.rand(3, 2), torch.rand(3, 2).t(), torch.rand(4)]
    given = [*first, first[-1]]  # two weights have the same gradient
    expected = [gradient.clone() for gradient in given]
    add_gradients(weights, given)
    weights[0].grad = None  # one of them has none yet when the next come
    more = [torch.rand_like(weight) for weight in weights]
    wanted = [more[0], *(one + two for one, two in zip(expected[1:], more[1:], strict=True))]
    add_gradients(weights, more)
    for weight, gradient in zip(weights, wanted, strict=True):
        assert weight.grad is not None
        assert weight.grad.stride() == weight.stride()
        assert torch.equal(weight.grad, gradient)


def test_a_sparse_gradient_stays_sparse() -> None:
    weight = torch.zeros(3, 2)
    add_gradient(weight, torch.rand(3, 2).to_sparse(), shared=True)
    assert weight.grad is not None
    assert weight.grad.is_sparse
