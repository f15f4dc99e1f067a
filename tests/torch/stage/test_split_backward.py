"""The backward in two parts is the backward: errors first, weight gradients later, nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bapipe.torch.stage.saved_tensors import SavedValues
from bapipe.torch.stage.split_backward import SplitBackward
from bapipe.torch.zoo.resnet import build_resnet50

Module = Callable[[], nn.Module]


class _Branchy(nn.Module):
    """One weight used twice, weights of every usual layer, a skip, and an output that no input leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.added, self.side = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(3))
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        made = self.twice(self.twice(self.first(value).relu()) + self.added)
        made, _ = self.recurrent(self.norm(made) + value)
        made = self.normed(made)
        return made + self.attention(made, made, made)[0], self.side * 2


class _Outputs(nn.Module):
    """Two outputs that share a trunk; a weight that only the second one sees."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 5)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        made = self.shared(value).tanh()
        return self.one(made), self.two(made)


class _Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.two.weight = self.one.weight

    def forward(self, value: Tensor) -> tuple[Tensor, ...]:
        return (self.two(self.one(value).relu()),)


class _Frozen(nn.Module):
    """A layer that is not trained between two that are, and a bias that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.still, self.two = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.still.requires_grad_(False)
        self.two.bias.requires_grad_(False)

    def forward(self, value: Tensor) -> tuple[Tensor, ...]:
        return (self.two(self.still(self.one(value).relu())),)


class _Embedded(nn.Module):
    """A stage that adds something without a trunk: an embedding of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.one = nn.Embedding(5, 8), nn.Linear(8, 8)

    def forward(self, value: Tensor) -> tuple[Tensor, ...]:
        return (self.one(value + self.positions(torch.arange(5))),)


class _Aside(nn.Module):
    """A recurrent layer over something else, which the trunk uses twice and which is also an output."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.before = nn.Embedding(5, 8), nn.Linear(8, 8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.query, self.value, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, value: Tensor) -> tuple[Tensor, ...]:
        said, _ = self.recurrent(self.before(self.words(torch.arange(5))).expand(len(value), 5, 8))
        weights = (self.query(said) @ self.value(value).transpose(1, 2)).softmax(-1)
        return self.last(weights @ value + said), said


class _Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Unflatten(1, (1, 5)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(1)
        )

    def forward(self, value: Tensor) -> tuple[Tensor, ...]:
        return (self.layers(value),)


MODULES: dict[str, Module] = {
    "branches": _Branchy,
    "several outputs": _Outputs,
    "tied": _Tied,
    "frozen": _Frozen,
    "no trunk": _Embedded,
    "convolution": _Convolutional,
    "stem": _Aside,
}


def _made(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, list[Tensor], list[list[Tensor]]]:
    """A module, three inputs, and for each an error of every output."""
    torch.manual_seed(0)
    module = MODULES[name]().to(dtype)
    values = [torch.randn(4, 5, 8, dtype=dtype) for _ in range(3)]
    errors = [[torch.randn_like(item) for item in module(value)] for value in values]
    return module, values, errors


def _at_once(module: nn.Module, value: Tensor, errors: list[Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    module.zero_grad()
    given = value.clone().requires_grad_()
    torch.autograd.backward(list(module(given)), errors)
    assert given.grad is not None
    return given.grad, {name: item.grad for name, item in module.named_parameters()}


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_two_parts_are_the_whole(name: str, fixed: bool, watched: bool) -> None:
    """Of three micro-batches, all the first parts before any second part, as zero-bubble orders have it."""
    module, values, errors = _made(name)
    apart = [_at_once(module, value, error) for value, error in zip(values, errors, strict=True)]
    expected = {
        key: None if first is None else sum(gradients[key] for _, gradients in apart)
        for key, first in apart[0][1].items()
    }
    module.zero_grad()
    split = SplitBackward(list(module.parameters()), fixed=fixed)
    delayed = []
    for value, error, (wanted, _) in zip(values, errors, apart, strict=True):
        given = value.clone().requires_grad_()
        saved = SavedValues() if watched else None
        with nullcontext() if saved is None else saved.watching():
            made = list(module(given))
        delayed.append(split.run(made, error, [given], saved=saved))
        assert given.grad is not None
        torch.testing.assert_close(given.grad, wanted, rtol=1e-12, atol=1e-14)
    waiting = [key for key, item in module.named_parameters() if item.grad is None and expected[key] is not None]
    assert waiting or watched, "no weight waits for the second part"
    for item in delayed:
        item.run()
    for key, item in module.named_parameters():
        if expected[key] is None:
            assert item.grad is None
        else:
            torch.testing.assert_close(item.grad, expected[key], rtol=1e-12, atol=1e-14)


def test_only_what_weights_need_is_held_between_the_parts() -> None:
    """Of a product its input and the gradient of its output; of what is between products nothing."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Softmax(1), nn.Tanh(), nn.Linear(16, 4)).double()
    split = SplitBackward(list(module.parameters()))
    for first in (True, False):
        given = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
        saved = SavedValues()
        with saved.watching():
            made = module(given)
        before = len(saved.values())
        delayed = split.run([made], [torch.ones_like(made)], [given], saved=saved)
        if first:  # both parts at once, to see what the second needs
            assert all(item.grad is not None for item in module.parameters())
            assert not delayed.gradients()
    assert sorted(item.shape for item in delayed.gradients()) == [(3, 4), (3, 16)]
    weights = {item.data_ptr() for item in module.parameters()}
    held = [item for item in saved.values().values() if item.data_ptr() not in weights]
    assert [item.shape for item in held] == [(3, 8), (3, 16)]
    assert before > len(held) + 2


def test_the_second_part_lets_go_of_what_it_has_used() -> None:
    """When the gradient of the first weights is there, all above has been let go, as in a backward at once."""
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    split = SplitBackward(list(module.parameters()))
    left: list[int] = []
    module[0].weight.register_hook(lambda _: left.append(len(saved.values())))
    for _ in range(2):
        saved = SavedValues()
        with saved.watching():
            made = module(torch.randn(3, 8, dtype=torch.float64))
        held = len(saved.values())
        delayed = split.run([made], [torch.ones_like(made)], [], saved=saved)
        del made
        delayed.run()
    assert held > 4
    assert left[-1] <= 1


def test_the_first_part_lets_go_as_it_goes_of_what_the_second_does_not_need() -> None:
    """When the gradient of the input is there, only what products need for their weights is left."""
    module = nn.Sequential(
        nn.Linear(8, 16), nn.Softmax(1), nn.Linear(16, 16), nn.Softmax(1), nn.Linear(16, 4)
    ).double()
    split = SplitBackward(list(module.parameters()))
    left: list[int] = []
    for _ in range(2):
        given = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
        saved = SavedValues()
        given.register_hook(lambda _, saved=saved: left.append(len(saved.values())))
        with saved.watching():
            made = module(given)
        held = len(saved.values())
        delayed = split.run([made], [torch.ones_like(made)], [given], saved=saved)
        there = len(saved.values())
        delayed.run()
    assert held > there
    assert left == [held, there]


class _AsksTwice(torch.autograd.Function):
    """A backward that looks up what it saved one by one, as many do."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(value, scale)
        return value.sin() * scale

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        value = ctx.saved_tensors[0]
        scale = ctx.saved_tensors[1]
        return error * value.cos() * scale, None


def test_a_backward_may_ask_for_what_it_saved_more_than_once() -> None:
    torch.manual_seed(0)
    entry, last = nn.Linear(8, 8).double(), nn.Linear(8, 4).double()
    scale = torch.full((8,), 3.0, dtype=torch.float64)
    weights = [*entry.parameters(), *last.parameters()]
    split = SplitBackward(weights)
    for _ in range(3):
        given = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
        whole = last(_AsksTwice.apply(entry(given), scale)).sum()  # type: ignore[no-untyped-call]
        wanted = torch.autograd.grad(whole, [given, *weights])
        for item in weights:
            item.grad = None
        saved = SavedValues()
        with saved.watching():
            made = last(_AsksTwice.apply(entry(given), scale)).sum()  # type: ignore[no-untyped-call]
        split.run([made], [None], [given], saved=saved).run()
        for found, expected in zip([given, *weights], wanted, strict=True):
            torch.testing.assert_close(found.grad, expected, rtol=1e-12, atol=1e-14)


def test_a_graph_that_saves_another_number_of_values_is_kept() -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 8).double()
    split = SplitBackward(list(module.parameters()))
    for times in (1, 2, 1):
        for item in module.parameters():
            item.grad = None
        given = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
        saved = SavedValues()
        with saved.watching():
            made = module(given)
            for _ in range(times):
                made = made.tanh()
        split.run([made], [torch.ones_like(made)], [given], saved=saved).run()
        expected = torch.autograd.grad(_tanh(module(given), times).sum(), list(module.parameters()))
        for item, wanted in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(item.grad, wanted, rtol=1e-12, atol=1e-14)


def _tanh(value: Tensor, times: int) -> Tensor:
    for _ in range(times):
        value = value.tanh()
    return value


def test_which_weights_cannot_wait() -> None:
    """One that hangs on several nodes of the trunk gets its gradient in the first part; all others wait."""
    module, values, errors = _made("branches")
    given = values[0].clone().requires_grad_()
    delayed = SplitBackward(list(module.parameters())).run(list(module(given)), errors[0], [given])
    early = {key for key, item in module.named_parameters() if item.grad is not None}
    # On a CPU an LSTM is a node for every time step.
    assert early == {"twice.weight", "twice.bias", "recurrent.weight_hh_l0", "recurrent.bias_hh_l0"}
    delayed.run()
    assert all(item.grad is not None for item in module.parameters())


def test_what_all_ways_lead_through_waits_too() -> None:
    """The recurrent layer and what is before it; all has its gradient when the second part is done."""
    module, values, errors = _made("stem")
    given = values[0].clone().requires_grad_()
    delayed = SplitBackward(list(module.parameters())).run(list(module(given)), errors[0], [given])
    assert {key for key, item in module.named_parameters() if item.grad is not None} == set()
    assert len(delayed.stems) == 1
    delayed.run()
    assert all(item.grad is not None for item in module.parameters())


def test_a_stage_that_wants_no_error() -> None:
    """The first stage: all of its backward is the second part."""
    module, values, errors = _made("frozen")
    _, expected = _at_once(module, values[0], errors[0])
    module.zero_grad()
    delayed = SplitBackward(list(module.parameters())).run(list(module(values[0])), errors[0], [])
    assert all(item.grad is None for item in module.parameters())
    delayed.run()
    for key, item in module.named_parameters():
        assert item.grad is expected[key] or torch.equal(item.grad, expected[key])  # type: ignore[arg-type]


def test_autocast_casts_once_for_both_parts() -> None:
    module, values, errors = _made("several outputs", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        made = [item.dtype for item in module(values[0])]
    assert made == [torch.bfloat16, torch.bfloat16]
    lower = [error.bfloat16() for error in errors[0]]

    def forward(given: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return list(module(given))

    given = values[0].clone().requires_grad_()
    torch.autograd.backward(forward(given), lower)
    expected = {name: item.grad for name, item in module.named_parameters()}
    wanted = given.grad
    module.zero_grad()
    given = values[0].clone().requires_grad_()
    delayed = SplitBackward(list(module.parameters())).run(forward(given), lower, [given])
    delayed.run()
    assert torch.equal(given.grad, wanted)  # type: ignore[arg-type]
    for name, item in module.named_parameters():
        assert torch.equal(item.grad, expected[name])  # type: ignore[arg-type]


def test_another_graph_is_dissected_anew() -> None:
    """A module whose forward takes another way is not taken for the one before."""
    torch.manual_seed(0)
    one, two = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
    parameters = [*one.parameters(), *two.parameters()]
    split = SplitBackward(parameters)
    error = torch.randn(4, 8, dtype=torch.float64)
    for chosen in ((one, two), (two,), (one,), (two, one)):
        value = torch.randn(4, 8, dtype=torch.float64)

        def forward(given: Tensor, chosen: tuple[nn.Module, ...] = chosen) -> Tensor:
            for layer in chosen:
                given = layer(given).tanh()
            return given

        for item in parameters:
            item.grad = None
        given = value.clone().requires_grad_()
        forward(given).backward(error)
        expected = [None if item.grad is None else item.grad.clone() for item in parameters]
        for item in parameters:
            item.grad = None
        again = value.clone().requires_grad_()
        split.run([forward(again)], [error], [again]).run()
        assert torch.equal(again.grad, given.grad)  # type: ignore[arg-type]
        for item, wanted in zip(parameters, expected, strict=True):
            assert (item.grad is None) == (wanted is None)
            assert wanted is None or torch.equal(item.grad, wanted)  # type: ignore[arg-type]


def test_all_weights_of_a_resnet_wait() -> None:
    module, _, _ = build_resnet50(image=32, width=4, classes=5, float64=True)
    given = torch.randn(2, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    made = module(given)
    delayed = SplitBackward(list(module.parameters())).run([made], [torch.ones_like(made)], [given])
    assert all(item.grad is None for item in module.parameters())
    delayed.run()
    assert all(item.grad is not None for item in module.parameters())
